// Standard Gumbel numbers on a CPU: Philox4x32-10 and two logarithms in registers, W pairs of ids at a time.
//
// The words are those of engine/sampling/noise.py. Logarithms are in float64, within 2 units of its last place, and the result
// is rounded once to float32: another library's logarithm gives the same bits but where a rounding boundary lies
// between the two.

#include <algorithm>
#include <cstring>

#include "engine/sampling/doubles.hpp"

namespace {

constexpr int64_t IDS_PER_TASK = 4096;
constexpr uint64_t MASK = 0xffffffff;

// Of positive numbers that are neither subnormal nor infinite: x = 2^k m, m in [sqrt(1/2), sqrt(2)), and
// log(m) = 2 atanh(s), s = (m - 1) / (m + 1), by its series: |s| < 0.172, so twelve terms reach 2^-56.
inline doubles log_of(doubles x) {
    constexpr uint64_t ROOT_OF_HALF = 0x3fe6a09e667f3bcd, ONE = 0x3ff0000000000000, MANTISSA = 0x000fffffffffffff;
    const words shifted = (words)x + (ONE - ROOT_OF_HALF);
    const doubles f = (doubles)((shifted & MANTISSA) + ROOT_OF_HALF) - number(1);
    const doubles s = f / (f + number(2)), z = s * s;
    doubles series = number(1.0 / 23);
    for (int n = 21; n >= 3; n -= 2) series = series * z + number(1.0 / n);
    // 2 s = f - s f: f is exact, which keeps the digits of a logarithm near 0. ln(2) in two parts, the first short.
    const doubles whole = number_of(shifted >> 52) - number(1023);
    const doubles rest = 2 * s * z * series - s * f + whole * number(1.90821492927058770002e-10);
    return whole * number(6.93147180369123816490e-01) + (f + rest);
}

// -log(-log(u)) of u = (high 32 bits, low 21 bits) / 2^53; 0 counts as 2^-54.
inline floats gumbel_of(words high, words low) {
    const doubles u = number_of(high) * number(0x1p-32) + number_of(low >> 11) * number(0x1p-53);
    const doubles positive = u > number(0x1p-54) ? u : number(0x1p-54);
    return __builtin_convertvector(-log_of(-log_of(positive)), floats);
}

// Ids first .. last - 1 of one row; first is even.
void draw(uint64_t seed, uint64_t request, uint64_t position, uint64_t purpose, int64_t first, int64_t last, float* to) {
    for (int64_t id = first; id < last; id += 2 * W) {
        words c0, c1 = purpose + words{}, c2 = position + words{}, c3 = request + words{};
        for (int lane = 0; lane < W; ++lane) c0[lane] = id / 2 + lane;
        uint64_t k0 = seed & MASK, k1 = seed >> 32;
        for (int round = 0; round < 10; ++round) {
            const words a = product(c0, 0xD2511F53), b = product(c2, 0xCD9E8D57);
            c0 = (b >> 32) ^ c1 ^ k0, c1 = b & MASK, c2 = (a >> 32) ^ c3 ^ k1, c3 = a & MASK;
            k0 = (k0 + 0x9E3779B9) & MASK, k1 = (k1 + 0xBB67AE85) & MASK;
        }
        const floats even = gumbel_of(c0, c1), odd = gumbel_of(c2, c3);
        float drawn[2 * W];
        for (int lane = 0; lane < W; ++lane) drawn[2 * lane] = even[lane], drawn[2 * lane + 1] = odd[lane];
        std::memcpy(to + id, drawn, std::min<int64_t>(2 * W, last - id) * sizeof(float));
    }
}

}  // namespace

// Counters as of engine/sampling/noise.py: (pair of ids, purpose, position, request); words of c1 are the purpose.
// seed, request, position [n_row]; out [n_row, n_id].
extern "C" void foretoken_gumbel(int64_t n_row, int64_t n_id, const int64_t* seed, const int64_t* request,
                                 const int64_t* position, int64_t purpose, float* out, int n_thread) {
    const int64_t per_row = (n_id + IDS_PER_TASK - 1) / IDS_PER_TASK;
#pragma omp parallel for num_threads(n_thread) schedule(static)
    for (int64_t task = 0; task < n_row * per_row; ++task) {
        const int64_t row = task / per_row, first = task % per_row * IDS_PER_TASK;
        draw(seed[row], request[row], position[row], purpose, first, std::min(first + IDS_PER_TASK, n_id),
             out + row * n_id);
    }
}
