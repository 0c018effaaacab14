// Attention of a few query tokens over a long KV cache on a CPU: one pass over keys and values, softmax on the way.
//
// A task is a KV head of a row, a part of its slots, and a block of its query rows (the tokens and the heads that share
// the KV head), so an entry is read once for a whole block. Slots are read in tiles. Keys and values of a tile are
// rearranged in registers into words of 32 bits: one float32, two bfloat16 or four int8, which one or two instructions
// multiply and add (see Products); values that need no other order stay where they are. The arithmetic of a query row
// does not depend on the other rows of its block, nor on their number: verifying T tokens gives the bits of decoding
// them one by one.

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "models/attention/selection.hpp"
#include "models/attention/tiles.hpp"

namespace {

constexpr int SCORED = 8;  // neighbouring slots that share a score, as SCORE_CHUNK in kv_cache/entries.py

// Writes the largest of every SCORED scores of a tile to [TILE / SCORED].
inline void keep_largest(const float* scores, float* to) {
    static_assert(SCORED == 8);
    ivec next, second, fourth, first_of_each;  // lanes of shuffles, modulo W
    for (int lane = 0; lane < W; ++lane) {
        next[lane] = lane ^ 1;
        second[lane] = lane ^ 2;
        fourth[lane] = lane ^ 4;
        first_of_each[lane] = SCORED * lane % TILE;
    }
    vec half[2];
    for (int i = 0; i < 2; ++i) {
        vec x = load(scores + i * W);
        x = larger(x, __builtin_shuffle(x, next));
        x = larger(x, __builtin_shuffle(x, second));
        half[i] = larger(x, __builtin_shuffle(x, fourth));
    }
    if (W < SCORED) half[0] = larger(half[0], half[1]);
    const vec largest = __builtin_shuffle(half[0], half[1], first_of_each);
    std::memcpy(to, &largest, TILE / SCORED * sizeof(float));
}

inline bool any_exceeds(vec x, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ);
#elif defined(__AVX2__) && !defined(AMX)
    return _mm256_movemask_ps((__m256)(x > broadcast(limit)));
#else
    const ivec exceeds = x > broadcast(limit);
    int32_t found = 0;
    for (int lane = 0; lane < W; ++lane) found |= exceeds[lane];
    return found;
#endif
}

// The positions that a query row sees: [oldest, newest].
struct Sight { int64_t oldest, newest; };

// Attends with a block of query rows to a part of a KV head: writes results that are not normalised to `out` [n_row, D],
// each row's largest score to `largest`, and its sum of weights to `mass`. kept: null, or takes the largest of every
// SCORED scores, [n_row, n_kept].
template <int D, typename Entries>
void attend_part(Entries& entries, int n_row, const int64_t* slots, const Sight* sees, int64_t first, int64_t last,
                 float* kept, int64_t n_kept, float* out, float* largest, float* mass) {
    alignas(64) float weights[BLOCK * TILE];
    vec masses[BLOCK];
    std::memset(out, 0, n_row * D * sizeof(float));
    // Positions that some query sees, and positions that all queries see.
    Sight some = sees[0], all = sees[0];
    for (int m = 0; m < n_row; ++m) {
        largest[m] = MINUS_INFINITY;
        masses[m] = vec{};
        some = {std::min(some.oldest, sees[m].oldest), std::max(some.newest, sees[m].newest)};
        all = {std::max(all.oldest, sees[m].oldest), std::min(all.newest, sees[m].newest)};
    }
    for (int64_t start = first; start < last; start += TILE) {
        const int n = (int)(last - start < TILE ? last - start : TILE);
        const int64_t* positions = slots + start - first;
        int in_some = 0, in_all = 0;
        for (int s = 0; s < n; ++s) {
            in_some += positions[s] >= some.oldest && positions[s] <= some.newest;
            in_all += positions[s] >= all.oldest && positions[s] <= all.newest;
        }
        if (in_some == 0) {
            for (int m = 0; kept && m < n_row; ++m)
                std::fill_n(kept + m * n_kept + start / SCORED, TILE / SCORED, MINUS_INFINITY);
            continue;
        }
        entries.scores(n_row, start, n, weights);
        for (int m = 0; m < n_row; ++m) {
            float* w = weights + m * TILE;
            if (in_all < TILE) {
                for (int s = 0; s < n; ++s)
                    if (positions[s] < sees[m].oldest || positions[s] > sees[m].newest) w[s] = MINUS_INFINITY;
                for (int s = n; s < TILE; ++s) w[s] = MINUS_INFINITY;
            }
            if (kept) keep_largest(w, kept + m * n_kept + start / SCORED);
            const vec top = larger(load(w), load(w + W));
            if (any_exceeds(top, largest[m])) {
                const float highest = largest_lane(top);
                const vec shrink = broadcast(std::exp2(largest[m] - highest));
                masses[m] *= shrink;
                for (int d = 0; d < D; d += W) store(out + m * D + d, load(out + m * D + d) * shrink);
                largest[m] = highest;
            }
            // If nothing was seen so far, 0 in place of -infinity makes all weights 0.
            const vec highest = broadcast(largest[m] == MINUS_INFINITY ? 0 : largest[m]);
            for (int s = 0; s < TILE; s += W) {
                const vec p = exp2_of(load(w + s) - highest);
                masses[m] += p;
                store(w + s, p);
            }
        }
        entries.add(weights, n_row, start, n, out);
    }
    for (int m = 0; m < n_row; ++m) mass[m] = sum_of_lanes(masses[m]);
    entries.finish(n_row, out);
}

// Writes the share of a token's attention that the best of every SCORED slots gets, averaged over the G heads, to [n].
// scores: [G, n_kept]; whole: the score that would get all attention of a head, [G].
inline void write_shares(const float* scores, int64_t n_kept, int64_t group, const float* whole, int64_t n, float* to) {
    for (int64_t start = 0; start < n; start += W) {
        vec share{};
        for (int64_t g = 0; g < group; ++g)
            share += exp2_of(load(scores + g * n_kept + start) - broadcast(whole[g]));
        std::memcpy(to + start, &share, std::min<int64_t>(W, n - start) * sizeof(float));
    }
}

// Copies positions of slots to `to`, with EMPTY for tokens in the ring [n_ring], so that no token is seen twice.
inline void without_recent(const int64_t* slots, const int64_t* ring, int64_t n_ring, int64_t first, int64_t last,
                           int64_t* to) {
    for (int64_t slot = first, in_ring = first % n_ring; slot < last; ++slot) {
        to[slot - first] = ring[in_ring] == slot ? EMPTY : slots[slot];
        in_ring = in_ring + 1 == n_ring ? 0 : in_ring + 1;
    }
}

// Copies numbers from a row of queries, and to a row of the output.
inline void copy_row(const void* from, int64_t at, bool is_bfloat16, float* to, int n) {
    if (!is_bfloat16) std::memcpy(to, (const float*)from + at, n * sizeof(float));
    for (int i = 0; is_bfloat16 && i < n; i += W) store(to + i, load((const bfloat16*)from + at + i));
}
inline void copy_row(const float* from, void* to, int64_t at, bool is_bfloat16, int n) {
    if (!is_bfloat16) std::memcpy((float*)to + at, from, n * sizeof(float));
    for (int i = 0; is_bfloat16 && i < n; ++i)
        ((bfloat16*)to)[at + i] = bfloat16(from[i] == from[i] ? from[i] : std::nanf(""));
}

template <int D, typename Entry, typename P>
void attend(const Call& at, int n_thread) {
    const int64_t n_own = (at.n_slot + at.part - 1) / at.part, n_part = n_own + (at.n_packed + at.part - 1) / at.part;
    const int64_t n_row = at.n_token * at.group, n_block = (n_row + BLOCK - 1) / BLOCK;
    const int64_t n_head = at.batch * at.n_kv_head, n_task = n_head * n_part * n_block;
    const int64_t per_part = n_row * (D + 2), n_chunk = (at.n_slot + SCORED - 1) / SCORED;
    const int64_t n_kept = (n_chunk + W - 1) / W * W;
    const float scale = 1.4426950408889634f / std::sqrt((float)at.head_dim);  // log2(e)
    const std::unique_ptr<float[]> scores(at.chunk_scores ? new float[n_head * n_row * n_kept] : nullptr);
#pragma omp parallel num_threads(n_thread)
    {
#if defined(AMX)
        const AmxTiles tiles;
#endif
        std::vector<int64_t> older(at.part);
        alignas(64) float queries[BLOCK * D] = {};
        Sight sees[BLOCK];
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < n_task; ++task) {
            const int64_t head = task / n_block / n_part, part = task / n_block % n_part, block = task % n_block * BLOCK;
            const int64_t row = head / at.n_kv_head, kv_head = head % at.n_kv_head;
            const int64_t stored = at.rows ? at.rows[row] : row;
            const int n = (int)std::min<int64_t>(BLOCK, n_row - block);
            for (int m = 0; m < n; ++m) {
                const int64_t token = (block + m) / at.group, of_group = (block + m) % at.group;
                const int64_t newest = at.newest[row * at.n_token + token];
                sees[m] = {at.window ? std::max<int64_t>(0, newest - at.window + 1) : 0, newest};
                const int64_t q_head = kv_head * at.group + of_group;
                copy_row(at.q, row * at.q_row + token * at.q_token + q_head * at.q_head, at.q_is_bfloat16,
                         queries + m * D, (int)at.head_dim);
            }
            const auto attend_to = [&](auto&& own, const int64_t* slots, int64_t first, int64_t last) {
                float *sums = at.workspace + (head * n_part + part) * per_part, *largest = sums + n_row * D + block;
                own.take(queries, n, scale);
                attend_part<D>(own, n, slots, sees, first, last,
                               at.chunk_scores ? scores.get() + (head * n_row + block) * n_kept : nullptr, n_kept,
                               sums + block * D, largest, largest + n_row);
            };
            if (part < n_own) {
                const int64_t first = part * at.part;
                attend_to(Stored<D, Entry, P>(at, stored, kv_head), at.slots + row * at.n_slot + first, first,
                          std::min(first + at.part, at.n_slot));
                continue;
            }
            const int64_t first = (part - n_own) * at.part, last = std::min(first + at.part, at.n_packed);
            without_recent(at.packed_slots + row * at.n_packed, at.slots + row * at.n_slot, at.n_slot, first, last,
                           older.data());
            attend_to(In4Bits<D>(at, stored, kv_head), older.data(), first, last);
        }
    }
#pragma omp parallel for num_threads(n_thread) collapse(2) if (n_head * n_row >= 4096)
    for (int64_t head = 0; head < n_head; ++head)
        for (int64_t m = 0; m < n_row; ++m) {
            const float* partials = at.workspace + head * n_part * per_part;
            float highest = MINUS_INFINITY, total = 0, sums[D] = {};
            for (int64_t p = 0; p < n_part; ++p) {
                const float x = partials[p * per_part + n_row * D + m];
                highest = x > highest ? x : highest;
            }
            for (int64_t p = 0; p < n_part; ++p) {
                const float* partial = partials + p * per_part;
                const float weight = std::exp2(partial[n_row * D + m] - highest);
                if (!(weight > 0)) continue;
                total += weight * partial[n_row * (D + 1) + m];
                for (int d = 0; d < D; ++d) sums[d] += weight * partial[m * D + d];
            }
            for (int d = 0; d < D; ++d) sums[d] /= total;
            const int64_t row = head / at.n_kv_head, token = m / at.group;
            const int64_t kv_head = (row * at.n_token + token) * at.n_kv_head + head % at.n_kv_head;
            const int64_t q_head = kv_head * at.group + m % at.group;
            copy_row(sums, at.out, q_head * at.head_dim, at.q_is_bfloat16, (int)at.head_dim);
            at.workspace[head * n_part * per_part + n_row * D + m] = highest + std::log2(total * at.group);
        }
    if (!at.chunk_scores) return;
#pragma omp parallel for num_threads(n_thread) schedule(static)
    for (int64_t task = 0; task < n_head * at.n_token; ++task) {
        const int64_t token = task % at.n_token, head = task / at.n_token, m = token * at.group;
        const int64_t row = head / at.n_kv_head, stored = at.rows ? at.rows[row] : row;
        write_shares(scores.get() + (head * n_row + m) * n_kept, n_kept, at.group,
                    at.workspace + head * n_part * per_part + n_row * D + m, n_chunk,
                    at.chunk_scores + stored * at.scores_row + token * at.scores_token + head % at.n_kv_head * at.scores_head);
    }
}

}  // namespace

// Returns 0, or 1 if there is no kernel for these entries.
extern "C" int foretoken_attend(const Call& call, int n_thread) {
    const auto with = [&](auto entry, auto products) {
        if (call.head_dim > 128) return 1;
        if (call.head_dim > 64) return attend<128, decltype(entry), decltype(products)>(call, n_thread), 0;
        return attend<64, decltype(entry), decltype(products)>(call, n_thread), 0;
    };
    if (call.entries == 0) return with(float{}, Float32Products{});
    if (call.entries == 1 && !call.q_is_bfloat16) return with(bfloat16{}, WidenedProducts{});  // queries stay as they are
    if (call.entries == 1) return with(bfloat16{}, Bfloat16Products{});
    if (call.entries == 2) return with(int8_t{}, Int8Products{});
    return call.entries == 3 ? with(float8{}, Float32Products{}) : 1;
}
