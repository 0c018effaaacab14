// Top-k and top-p of scaled logits on a CPU. The ids of a row are counted and weighed by the leading bits of their
// logits, and only ids that share these bits with the last one kept are sorted.

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "engine/sampling/doubles.hpp"

namespace {

constexpr int DROPPED = 20, N_BUCKET = 1 << (31 - DROPPED);
constexpr double WHOLE = 0x1p62;  // the mass of all ids
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// e^x of x <= 0, and 0 in place of numbers below the normal ones: a power of 2 times Taylor's series.
inline doubles exp_of(doubles x) {
    const doubles normal = x > number(-708) ? x : number(-708);
    const doubles scaled = normal * number(1.4426950408889634), whole = rounded(scaled);
    const doubles rest = normal - whole * number(6.93147180369123816490e-01) - whole * number(1.90821492927058770002e-10);
    doubles series = number(1.0 / 6227020800);
    constexpr double FACTORIALS[] = {479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1};
    for (const double factorial : FACTORIALS) series = series * rest + number(1 / factorial);
    return x > number(-708) ? (doubles)((longs)series + (integer_of(whole) << 52)) : doubles{};
}

// The next W logits, -infinity after the last one.
inline doubles load(const float* x, int64_t n) {
    floats some = MINUS_INFINITY - floats{};
    std::memcpy(&some, x, std::min<int64_t>(W, n) * sizeof(float));
    return __builtin_convertvector(some, doubles);
}

// Ascending for logits that descend from 0.
inline uint32_t key_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

struct Id {
    uint32_t key;
    int64_t id, mass;
    bool operator<(const Id& other) const { return key != other.key ? key < other.key : id < other.id; }
};

// Writes the logits x [n_id], the largest 0, to `to`, with -infinity for ids that have k ids or the mass `limit` before
// them: in likelier ids, and in lower ids that are as likely.
void filter(const float* x, int64_t n_id, int64_t k, double limit, std::vector<int64_t>& masses, std::vector<Id>& near,
            float* to) {
    const bool weighs = limit <= WHOLE;
    if (weighs) {
        masses.resize(n_id + W);
        doubles sums{}, each;
        for (int64_t i = 0; i < n_id; i += W) {
            sums += each = exp_of(load(x + i, n_id - i));
            std::memcpy(masses.data() + i, &each, sizeof each);
        }
        double sum = 0;
        for (int lane = 0; lane < W; ++lane) sum += sums[lane];
        const doubles scale = number(sum > 0 ? WHOLE / sum : 0);  // 0 for logits that are not finite
        for (int64_t i = 0; i < n_id; i += W) {
            std::memcpy(&each, masses.data() + i, sizeof each);
            // A mass has up to 62 bits: the upper 31 are converted, then the rest.
            const doubles mass = each * scale, high = rounded(mass * number(0x1p-31));
            const longs whole = (integer_of(high) << 31) + integer_of(mass - high * number(0x1p31));
            std::memcpy(masses.data() + i, &whole, sizeof whole);
        }
    }
    int64_t counts[N_BUCKET] = {}, sums[N_BUCKET] = {}, count = 0, mass = 0;
    for (int64_t i = 0; i < n_id; ++i) {
        const uint32_t bucket = key_of(x[i]) >> DROPPED;
        ++counts[bucket];
        if (weighs) sums[bucket] += masses[i];
    }
    uint32_t last = 0;  // the bucket of the last id that is kept
    for (; last < N_BUCKET && count + counts[last] < k && (double)(mass + sums[last]) < limit; ++last) {
        count += counts[last];
        mass += sums[last];
    }
    if (last == N_BUCKET) return (void)std::memcpy(to, x, n_id * sizeof(float));
    near.clear();
    for (int64_t i = 0; i < n_id; ++i)
        if (const uint32_t key = key_of(x[i]); key >> DROPPED == last) near.push_back({key, i, weighs ? masses[i] : 0});
    std::sort(near.begin(), near.end());
    Id kept{};
    for (const Id& id : near) {
        if (count >= k || (double)mass >= limit) break;
        kept = id;
        ++count;
        mass += id.mass;
    }
    for (int64_t i = 0; i < n_id; ++i) {
        const uint32_t key = key_of(x[i]);
        to[i] = key < kept.key || (key == kept.key && i <= kept.id) ? x[i] : MINUS_INFINITY;
    }
}

}  // namespace

// scaled and out: [n_row, n_token, n_id]; top_k and limit, a mass: [n_row].
extern "C" void foretoken_filter(int64_t n_row, int64_t n_token, int64_t n_id, const int64_t* top_k, const double* limit,
                                 const float* scaled, float* out, int n_thread) {
#pragma omp parallel num_threads(n_thread)
    {
        std::vector<int64_t> masses;
        std::vector<Id> near;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < n_row * n_token; ++i)
            filter(scaled + i * n_id, n_id, top_k[i / n_token], limit[i / n_token], masses, near, out + i * n_id);
    }
}
