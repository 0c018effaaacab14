// Entries of a row and head as they are stored, and their products with a block of queries, tile by tile.
#pragma once

#if defined(AMX)
#include "models/attention/amx_products.hpp"
#else
#include "models/attention/products.hpp"
#endif

namespace {

constexpr int BLOCK = 48;  // the most query rows of a task: their state fits the cache with a tile

// The arguments of a call. rows: the row of entries that each row of queries attends to; null: the row of the same number.
struct Call {
    int64_t head_dim, entries;  // entries: 0 float, 1 bfloat16, 2 int8, 3 float8; those in 8 bits have scales
    int64_t batch, n_kv_head, n_slot, n_token, group;  // group: query heads of a KV head
    int64_t q_row, q_token, q_head, q_is_bfloat16;  // strides in elements, here and below
    int64_t key_row, key_head, key_slot, value_row, value_head, value_slot, scale_row, scale_head;  // scales lie by slot
    int64_t part, window;  // slots per task, a multiple of TILE; the most positions that a query sees, 0: all
    int64_t scores_row, scores_token, scores_head;
    // The numbers of tokens in 4 bits, of tokens that share a key's grid, and of a value's grids; strides of Packed.
    int64_t n_packed, packed_group, n_value_grid, key_code_row, key_code_head, value_code_row, value_code_head;
    int64_t key_grid_both, key_grid_row, key_grid_head, value_grid_both, value_grid_row, value_grid_head, value_grid_part;
    const void* q;  // float, or bfloat16; also the output
    const int64_t* rows;
    const void *keys, *values;
    const float *key_scales, *value_scales;
    const int64_t *slots, *newest;  // positions of slots [batch, n_slot], and of queries [batch, n_token]
    // The fields of Packed, and the positions of its slots, or null; with them, `slots` are those of the recent tokens.
    const uint8_t *key_codes, *value_codes;
    const bfloat16 *key_grids, *value_grids;
    const int64_t* packed_slots;
    float* workspace;
    float* chunk_scores;  // `KV.chunk_scores`, or null
    void* out;  // [batch, tokens, heads, head_dim]
};

// Whether products are summed as integers, a tile at a time.
template <typename P>
constexpr bool IN_INTEGERS = std::is_same_v<typename P::Sum, ivec>;

// Computes scores of N query rows against a tile, as multiples of log2(e). q: words, by row and plane.
template <int N, int D, typename P>
inline void tile_scores(const float* q, const float* keys_t, const float* steps, const int32_t* taken_off,
                        Ahead& ahead, float* scores) {
    constexpr int WORDS = D / P::PACK;
    typename P::Sum acc[N][2] = {};
    ahead.begin(N, P::PLANES * WORDS / P::APART);
#pragma GCC unroll 2
    for (int plane = 0; plane < P::PLANES; ++plane) {
        if (plane)
#pragma GCC unroll 12
            for (int m = 0; m < N; ++m)
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) acc[m][half] = (typename P::Sum)((ivec)acc[m][half] << P::KEY_SHIFT);
        for (int d = 0; d < WORDS; d += P::APART) {
            const float* words = keys_t + d / P::APART * TILE;
            const vec k0 = load(words), k1 = load(words + W);
            ahead.ask();
            each<P::APART>([&](auto part) {
                const vec part0 = P::template part<part>(k0), part1 = P::template part<part>(k1);
#pragma GCC unroll 12
                for (int m = 0; m < N; ++m) {
                    const float word = q[(m * P::PLANES + plane) * WORDS + d + part];
                    acc[m][0] = P::times_query(acc[m][0], part0, word);
                    acc[m][1] = P::times_query(acc[m][1], part1, word);
                }
            });
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < N; ++m)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            vec x;
            if constexpr (IN_INTEGERS<P>)
                x = __builtin_convertvector(acc[m][half] - taken_off[m], vec);
            else
                x = acc[m][half];
            store(scores + m * TILE + half * W, x * broadcast(steps[m]));
        }
}

// out += weights * values, for N query rows and V vectors of the head dimension at a time, whose sums fit the registers.
template <int N, int D, typename P>
inline void tile_values(const float* weights, const float* values, const float* steps, Ahead& ahead, float* out) {
    constexpr int V = N <= (REGISTERS == 32 ? 7 : 2) ? 4 : 2, WORDS = TILE / P::PACK;
    constexpr int EVERY = REGISTERS == 32 ? 1 : 4;  // words between prefetches: AVX2's short steps wait for their branch
    ahead.begin(N, D / (V * W) * P::PLANES * WORDS / EVERY);
    for (int at = 0; at < D; at += V * W) {
        typename P::Sum acc[N][V] = {};
        if constexpr (!IN_INTEGERS<P>) {
#pragma GCC unroll 12
            for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) acc[m][v] = load(out + m * D + at + v * W);
        }
#pragma GCC unroll 2
        for (int plane = 0; plane < P::PLANES; ++plane) {
            if (plane)
#pragma GCC unroll 12
                for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) acc[m][v] = (typename P::Sum)((ivec)acc[m][v] << P::VALUE_SHIFT);
            for (int s = 0; s < WORDS; ++s) {
                if (s % EVERY == 0) ahead.ask();
                vec x[V];
#pragma GCC unroll 4
                for (int v = 0; v < V; v += P::APART) {
                    const vec words = load(values + (s * D + at + v * W) / P::APART);
                    each<P::APART>([&](auto part) { x[v + part] = P::template part<part>(words); });
                }
#pragma GCC unroll 12
                for (int m = 0; m < N; ++m) {
                    const float word = weights[(m * P::PLANES + plane) * WORDS + s];
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) acc[m][v] = P::times_weight(acc[m][v], x[v], word);
                }
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                float* to = out + m * D + at + v * W;
                if constexpr (IN_INTEGERS<P>)
                    store(to, load(to) + __builtin_convertvector(acc[m][v], vec) * broadcast(steps[m]));
                else
                    store(to, acc[m][v]);
            }
    }
}

// Calls `pass(row, size)` over all rows, in passes of N and then of fewer.
template <int N, typename Pass>
inline void in_passes(int row, int n_row, const Pass& pass) {
    for (; row + N <= n_row; row += N) pass(row, std::integral_constant<int, N>{});
    if constexpr (N > 1) in_passes<N - 1>(row, n_row, pass);
}

// The entries of a row and head as they are stored, of up to D numbers; zeros fill the rest. scales: those of entries in
// 8 bits, else null.
template <int D, typename Entry, typename P>
struct Stored {
    static constexpr int IN_WORD = P::PACK * P::APART, N = D / IN_WORD, TILE_BYTES = TILE * D * sizeof(Entry);
    typedef std::conditional_t<IN_WORD == 1, Entry, float> Word;
    const Word *keys, *values;
    int n_word;
    int64_t key_stride, value_stride;  // in words
    const float *key_scales, *value_scales;
    // The words and factors of the block's queries, then buffers for a tile.
    alignas(64) float q[BLOCK * P::PLANES * D / P::PACK], steps[BLOCK], weight_steps[BLOCK];
    int32_t taken_off[BLOCK];
    alignas(64) float tile[TILE * D / P::PACK], weight_words[BLOCK * P::PLANES * TILE / P::PACK];

    Stored(const Call& at, int64_t row, int64_t head)
        : keys((const Word*)((const Entry*)at.keys + row * at.key_row + head * at.key_head)),
          values((const Word*)((const Entry*)at.values + row * at.value_row + head * at.value_head)),
          n_word(at.head_dim / IN_WORD), key_stride(at.key_slot / IN_WORD), value_stride(at.value_slot / IN_WORD),
          key_scales(at.key_scales), value_scales(at.value_scales) {
        if (key_scales) key_scales += row * at.scale_row + head * at.scale_head;
        if (value_scales) value_scales += row * at.scale_row + head * at.scale_head;
    }
    // queries: [n_row, D] float32; scale: turns their products with keys into multiples of log2(e).
    void take(const float* queries, int n_row, float scale) {
        if constexpr (P::IN_AMX) {  // also words of rows that do not exist are multiplied
            std::memset(q, 0, sizeof q);
            std::memset(weight_words, 0, sizeof weight_words);
        }
        for (int m = 0; m < n_row; ++m) {
            P::template pack_query<D>(queries + m * D, q + m * P::PLANES * D / P::PACK, steps[m], taken_off[m]);
            steps[m] *= scale;
        }
    }
    void multiply(const float* by, int64_t start, int n, int n_row, float* weights) {
        for (int s = 0; s < TILE; s += W) {
            const vec scales = load_first(by + start + s, n - s);
            for (int m = 0; m < n_row; ++m) store(weights + m * TILE + s, load(weights + m * TILE + s) * scales);
        }
    }
    void score_tile(int n_row, Ahead ahead, float* weights) {
        if constexpr (P::IN_AMX) {
            P::template multiply<D / P::PACK, TILE, false>(q, tile, n_row, ahead, [&](int m, int at, vec x) {
                store(weights + m * TILE + at, x * broadcast(steps[m]));
            });
        } else
            in_passes<P::ROWS>(0, n_row, [&](int m, auto size) {
                const float* words = q + m * P::PLANES * D / P::PACK;
                tile_scores<size, D, P>(words, tile, steps + m, taken_off + m, ahead, weights + m * TILE);
            });
    }
    void add_tile(const float* weights, int n_row, const float* values, Ahead ahead, float* out) {
        constexpr int WORDS = P::PLANES * TILE / P::PACK;
        for (int m = 0; m < n_row; ++m) weight_steps[m] = P::pack_weights(weights + m * TILE, weight_words + m * WORDS);
        if constexpr (P::IN_AMX) {
            P::template multiply<TILE / P::PACK, D, true>(weight_words, values, n_row, ahead, [&](int m, int at, vec x) {
                store(out + m * D + at, load(out + m * D + at) + x * broadcast(weight_steps[m]));
            });
        } else
            in_passes<P::ROWS>(0, n_row, [&](int m, auto size) {
                tile_values<size, D, P>(weight_words + m * WORDS, values, weight_steps + m, ahead, out + m * D);
            });
    }
    // Computes the scores of all query rows against the n slots of a tile, to [n_row, TILE].
    void scores(int n_row, int64_t start, int n, float* weights) {
        const Word* from = keys + start * key_stride;
        transpose_keys<N>(from, key_stride, n, n_word, tile);
        if constexpr (P::FLIPPED != 0)
            for (int i = 0; i < N * TILE; i += W) store(tile + i, (vec)((uvec)load(tile + i) ^ P::FLIPPED));
        score_tile(n_row, {from + TILE * key_stride, TILE_BYTES, n_row}, weights);
        if (key_scales) multiply(key_scales, start, n, n_row, weights);
    }
    void add(float* weights, int n_row, int64_t start, int n, float* out) {
        const Word* from = values + start * value_stride;
        if (value_scales) multiply(value_scales, start, n, n_row, weights);
        const Ahead next{from + TILE * value_stride, TILE_BYTES, n_row};
        if constexpr (P::PACK == 1 && std::is_same_v<Word, float>)  // whole tiles need no copy
            if (n == TILE && n_word == N && value_stride == N) return add_tile(weights, n_row, from, next, out);
        P::template interleave<N>(from, value_stride, n, n_word, tile);
        add_tile(weights, n_row, tile, next, out);
    }
    void finish(int n_row, float* out) {
        if (P::PACK * P::APART == 1) return;
        for (int m = 0; m < n_row; ++m, out += D) {
            float sums[D];
            std::memcpy(sums, out, sizeof sums);
            for (int d = 0; d < D; ++d) out[d] = sums[interleaved<P>(d)];
        }
    }
};

// Entries in 4 bits, code * step + low, which are unpacked to tiles of float32. A byte has a code of each half of the
// head dimension, the first in the lower bits. In a group of keys, slots are the last dimension: [D / 2, group].
template <int D>
struct In4Bits : Stored<D, float, Float32Products> {
    static constexpr int HALF = D / 2;
    using Stored<D, float, Float32Products>::tile;
    const uint8_t *key_codes, *value_codes;
    const bfloat16 *key_low, *key_step, *value_low, *value_step;
    int64_t group, n_value_grid, value_grid_part;

    In4Bits(const Call& at, int64_t row, int64_t head)
        : Stored<D, float, Float32Products>(at, row, head),
          key_codes(at.key_codes + row * at.key_code_row + head * at.key_code_head),
          value_codes(at.value_codes + row * at.value_code_row + head * at.value_code_head),
          key_low(at.key_grids + row * at.key_grid_row + head * at.key_grid_head), key_step(key_low + at.key_grid_both),
          value_low(at.value_grids + row * at.value_grid_row + head * at.value_grid_head),
          value_step(value_low + at.value_grid_both), group(at.packed_group), n_value_grid(at.n_value_grid),
          value_grid_part(at.value_grid_part) {}

    static void unpack(const uint8_t* codes, vec (&halves)[2]) {
        const ivec both = widened(codes);
        halves[0] = __builtin_convertvector(both & 15, vec);
        halves[1] = __builtin_convertvector(both >> 4, vec);
    }
    void scores(int n_row, int64_t start, int n, float* weights) {
        vec halves[2];
        alignas(64) float low[D], step[D];
        for (int block = 0; block < n; block += W) {
            const int64_t in = (start + block) / group;
            for (int d = 0; d < D; d += W) store(low + d, load(key_low + in * D + d)), store(step + d, load(key_step + in * D + d));
            const uint8_t* codes = key_codes + in * HALF * group + (start + block) % group;
            for (int d = 0; d < HALF; ++d, codes += group) {
                __builtin_prefetch(codes + TILE * HALF, 0, 2);
                unpack(codes, halves);
                for (int half = 0, at = d; half < 2; ++half, at += HALF)
                    store(tile + at * TILE + block, halves[half] * broadcast(step[at]) + broadcast(low[at]));
            }
        }
        this->score_tile(n_row, {nullptr, 0, n_row}, weights);
    }
    void add(const float* weights, int n_row, int64_t start, int n, float* out) {
        vec halves[2];
        std::memset(tile + n * D, 0, (TILE - n) * D * sizeof(float));
        for (int s = 0; s < n; ++s)
            for (int d = 0; d < HALF; d += W) {
                const uint8_t* codes = value_codes + (start + s) * HALF + d;
                __builtin_prefetch(codes + TILE * HALF, 0, 2);
                unpack(codes, halves);
                for (int half = 0, at = d; half < 2; ++half, at += HALF) {
                    const int64_t grid = at * n_value_grid / D * value_grid_part + start + s;
                    store(tile + s * D + at, halves[half] * broadcast(value_step[grid]) + broadcast(value_low[grid]));
                }
            }
        this->add_tile(weights, n_row, tile, {nullptr, 0, n_row}, out);
    }
};

}  // namespace
