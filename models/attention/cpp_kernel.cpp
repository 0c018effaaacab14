// Attention of a few query tokens over a long KV cache on a CPU: one pass over keys and values, softmax on the way.
//
// A task is a KV head of a row, a part of its slots, and a block of its query rows (the tokens and the heads that share
// the KV head), so an entry is read once for a whole block. Slots are read in tiles. Keys and values of a tile
// are rearranged in registers into words of 32 bits: one float32, two bfloat16 or four int8, which one instruction
// multiplies and adds (see Products). The arithmetic of a query row does not depend on the other rows of its block, nor
// on their number: verifying T tokens gives the bits of decoding them one by one.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, ROWS = 6;  // lanes of a vector; query rows per pass, whose accumulators fill the registers
#elif defined(__AVX__)
constexpr int W = 8, ROWS = 3;
#else
constexpr int W = 4, ROWS = 3;
#endif
constexpr int TILE = 2 * W;  // slots per tile
constexpr int BLOCK = 48;  // the most query rows of a task: their state fits the cache beside a tile
constexpr int SCORED = 8;  // neighbouring slots that share a score, as SCORE_CHUNK in kv_cache/entries.py
constexpr int64_t EMPTY = -1;  // the position of an empty slot; also a slot that does not exist
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t hvec __attribute__((vector_size(2 * W)));
typedef int8_t bvec __attribute__((vector_size(W)));
typedef uint8_t ubvec __attribute__((vector_size(W)));
typedef float unaligned_vec __attribute__((vector_size(4 * W), aligned(4), may_alias));

struct bfloat16 {
    uint16_t bits;
    bfloat16() = default;
    explicit bfloat16(float x) {  // to the nearest, ties to even; only the quiet NaN stays NaN
        uint32_t all;
        std::memcpy(&all, &x, sizeof all);
        bits = (all + 0x7fff + (all >> 16 & 1)) >> 16;
    }
};
struct float8 { uint8_t bits; };  // e4m3fn

inline vec broadcast(float x) { return x - vec{}; }
inline vec broadcast(bfloat16 x) { return (vec)((uint32_t)x.bits << 16 | uvec{}); }
inline vec load(const float* p) { return *reinterpret_cast<const unaligned_vec*>(p); }
inline void store(float* p, vec x) { *reinterpret_cast<unaligned_vec*>(p) = x; }
inline vec load(const bfloat16* p) {
    hvec bits;
    std::memcpy(&bits, p, sizeof bits);
    return (vec)(__builtin_convertvector(bits, uvec) << 16);
}
inline vec load(const int8_t* p) {
    bvec bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, ivec), vec);
}
// Moves exponent and mantissa to their places in float32, also of subnormals; 2^120 corrects the bias (127, not 7).
inline vec load(const float8* p) {
    ubvec bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    const uvec bits = __builtin_convertvector(bytes, uvec);
    return (vec)((bits & 0x80) << 24 | (bits & 0x7f) << 20) * broadcast(0x1p120f);
}
inline vec larger(vec a, vec b) { return a > b ? a : b; }

// A vector's lanes, folded in halves: S lanes are left to fold.
template <int S = W / 2, typename Fold>
inline float across(vec x, const Fold& fold) {
    ivec other;
    for (int lane = 0; lane < W; ++lane) other[lane] = lane ^ S;
    x = fold(x, __builtin_shuffle(x, other));
    if constexpr (S > 1) return across<S / 2>(x, fold);
    return x[0];
}
inline float largest_lane(vec x) { return across(x, [](vec a, vec b) { return larger(a, b); }); }
inline float sum_of_lanes(vec x) { return across(x, [](vec a, vec b) { return a + b; }); }

// 2^x for x <= 0: exact powers for the whole part, a polynomial on [-1/2, 1/2] for the rest (error below 2e-7).
inline vec exp2_of(vec x) {
    x = larger(x, broadcast(-127.0f));
    const vec shifted = x + broadcast(12582912.0f);  // 1.5 * 2^23: rounds to whole numbers
    const vec f = x - (shifted - broadcast(12582912.0f));
    vec p = broadcast(1.5403530393381609e-4f);
    p = p * f + broadcast(1.3333558146428443e-3f);
    p = p * f + broadcast(9.618129107628477e-3f);
    p = p * f + broadcast(5.550410866482158e-2f);
    p = p * f + broadcast(2.402265069591007e-1f);
    p = p * f + broadcast(6.931471805599453e-1f);
    p = p * f + broadcast(1.0f);
    const uvec whole = (uvec)shifted << 23;
    const vec result = (vec)((uvec)p + whole);
    return x > broadcast(-126.0f) ? result : vec{};
}

// In-place transpose of W vectors: at each of log2(W) steps, halves of pairs are exchanged.
template <int S>
inline void exchange(vec* r) {
    ivec low, high;
    for (int lane = 0; lane < W; ++lane) {
        low[lane] = lane & S ? W + lane - S : lane;
        high[lane] = lane & S ? W + lane : lane + S;
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
        if (!(i & S)) {
            const vec a = r[i], b = r[i | S];
            r[i] = __builtin_shuffle(a, b, low);
            r[i | S] = __builtin_shuffle(a, b, high);
        }
    if constexpr (S > 1) exchange<S / 2>(r);
}

struct Layout {
    int64_t batch, n_kv_head, n_slot, n_token, group;  // group: query heads of a KV head
    int64_t q_row, q_token, q_head, q_is_bfloat16;  // strides in elements, here and below
    int64_t key_row, key_head, key_slot, value_row, value_head, value_slot, scale_row, scale_head, scale_slot;
    int64_t part, window;  // slots per task, a multiple of TILE; the most positions that a query sees, 0: all
    int64_t scores_row, scores_token, scores_head;
    // The numbers of tokens in 4 bits, of tokens that share a key's grid, and of a value's grids; strides of Packed.
    int64_t n_packed, packed_group, n_value_grid, key_code_row, key_code_head, value_code_row, value_code_head;
    int64_t key_grid_both, key_grid_row, key_grid_head, value_grid_both, value_grid_row, value_grid_head, value_grid_part;
};

// Transposes a tile of n keys of N words to [N, TILE]. Words of missing keys are 0.
template <int N, typename Entry>
inline void transpose_keys(const Entry* keys, int64_t stride, int n, float* to) {
    for (int block = 0; block < TILE; block += W)
        for (int d = 0; d < N; d += W) {
            vec r[W];
            for (int s = 0; s < W; ++s) r[s] = block + s < n ? load(keys + (block + s) * stride + d) : vec{};
            exchange<W / 2>(r);
            for (int i = 0; i < W; ++i) store(to + (d + i) * TILE + block, r[i]);
        }
}

// Products of entries with queries and with softmax weights, over words of PACK numbers. Queries and weights may be split
// into PLANES, from the most significant to the least.
//
// pack_query: computes the words [PLANES, D / PACK] of a query, the factor of its sums, and a number to subtract first.
// pack_weights: computes the words [PLANES, TILE / PACK] of a tile's weights, and the factor of their sums.
// interleave: packs a tile's values into words, [TILE / PACK, D], in the order of dimensions of `interleaved`.
struct Float32Products {
    static constexpr int PACK = 1, PLANES = 1, KEY_SHIFT = 0, VALUE_SHIFT = 0;
    typedef vec Sum;

    static Sum times_query(Sum sum, vec keys, float word) { return sum + broadcast(word) * keys; }
    static Sum times_weight(Sum sum, vec values, float word) { return sum + broadcast(word) * values; }

    template <int D>
    static void pack_query(const float* q, float* words, float& step, int32_t&) {
        std::memcpy(words, q, D * sizeof(float));
        step = 1;
    }
    static float pack_weights(const float* weights, float* words) {
        std::memcpy(words, weights, TILE * sizeof(float));
        return 1;
    }
    template <int D, typename Entry>
    static void transpose(const Entry* keys, int64_t stride, int n, float* to) {
        transpose_keys<D>(keys, stride, n, to);
    }
    template <int D, typename Entry>
    static void interleave(const Entry* values, int64_t stride, int n, float* to) {
        for (int s = 0; s < n; ++s)
            for (int d = 0; d < D; d += W) store(to + s * D + d, load(values + s * stride + d));
        std::memset(to + n * D, 0, (TILE - n) * D * sizeof(float));
    }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define BFLOAT16_PRODUCTS
inline __m512i bits_of(float word) {
    int32_t bits;
    std::memcpy(&bits, &word, sizeof bits);
    return _mm512_set1_epi32(bits);
}

// Products in bfloat16, sums in float32: weights and queries are rounded to bfloat16.
struct Bfloat16Products {
    static constexpr int PACK = 2, PLANES = 1, KEY_SHIFT = 0, VALUE_SHIFT = 0;
    typedef vec Sum;

    static Sum times_query(Sum sum, vec keys, float word) {
        return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)keys, (__m512bh)bits_of(word));
    }
    static Sum times_weight(Sum sum, vec values, float word) { return times_query(sum, values, word); }

    static void pack(const float* from, float* words) {
        const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)load(from + W), (__m512)load(from));
        std::memcpy(words, &pairs, sizeof pairs);
    }
    template <int D>
    static void pack_query(const float* q, float* words, float& step, int32_t&) {
        for (int d = 0; d < D; d += 2 * W) pack(q + d, words + d / 2);
        step = 1;
    }
    static float pack_weights(const float* weights, float* words) {
        pack(weights, words);
        return 1;
    }
    template <int D>
    static void transpose(const bfloat16* keys, int64_t stride, int n, float* to) {
        transpose_keys<D / 2>((const float*)keys, stride / 2, n, to);
    }
    template <int D>
    static void interleave(const bfloat16* values, int64_t stride, int n, float* to) {
        for (int s = 0; s < TILE; s += 2, to += D)
            for (int d = 0; d < D; d += 32) {
                const __m512i a = s < n ? _mm512_loadu_si512(values + s * stride + d) : __m512i{};
                const __m512i b = s + 1 < n ? _mm512_loadu_si512(values + (s + 1) * stride + d) : __m512i{};
                _mm512_storeu_si512(to + d, _mm512_unpacklo_epi16(a, b));
                _mm512_storeu_si512(to + d + W, _mm512_unpackhi_epi16(a, b));
            }
    }
};
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define INT8_PRODUCTS
// Products in 8 bits, sums exact. Queries are rounded to 15 bits, in planes of 8 and 7, and a tile's weights to 16, in
// two planes of 8, relative to the largest. One factor is unsigned: keys count from -128, which `taken_off` corrects.
struct Int8Products {
    static constexpr int PACK = 4, PLANES = 2, KEY_SHIFT = 7, VALUE_SHIFT = 8;
    typedef ivec Sum;

    static Sum times_query(Sum sum, vec keys, float word) {
        return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)keys, bits_of(word));
    }
    static Sum times_weight(Sum sum, vec values, float word) {
        return (ivec)_mm512_dpbusd_epi32((__m512i)sum, bits_of(word), (__m512i)values);
    }
    template <typename Byte>
    static void put(Byte* to, ivec x) {
        typedef Byte bytes __attribute__((vector_size(W)));
        const bytes narrow = __builtin_convertvector(x, bytes);
        std::memcpy(to, &narrow, sizeof narrow);
    }
    template <int D>
    static void pack_query(const float* q, float* words, float& step, int32_t& taken_off) {
        constexpr float LARGEST = 127 << KEY_SHIFT;
        vec top{}, nothing{};  // `nothing` becomes NaN after a number that is not finite
        for (int d = 0; d < D; d += W) {
            top = larger(top, larger(load(q + d), -load(q + d)));
            nothing += load(q + d) * broadcast(0);
        }
        step = largest_lane(top) / LARGEST + sum_of_lanes(nothing);
        const vec inverse = broadcast(step > 0 ? 1 / step : 0);
        ivec sum{};
        for (int d = 0; d < D; d += W) {
            const ivec x = (ivec)_mm512_cvtps_epi32((__m512)(load(q + d) * inverse));
            const ivec first = (x + (1 << (KEY_SHIFT - 1))) >> KEY_SHIFT;
            put((int8_t*)words + d, first);
            put((int8_t*)words + D + d, x - (first << KEY_SHIFT));
            sum += x;
        }
        taken_off = 128u * _mm512_reduce_add_epi32((__m512i)sum);
    }
    static float pack_weights(const float* weights, float* words) {
        const float largest = largest_lane(larger(load(weights), load(weights + W)));
        const vec inverse = broadcast(largest > 0 ? 65535 / largest : 0);
        for (int s = 0; s < TILE; s += W) {
            const ivec x = (ivec)_mm512_cvtps_epi32((__m512)(load(weights + s) * inverse));
            put((uint8_t*)words + s, x >> VALUE_SHIFT);
            put((uint8_t*)words + TILE + s, x & 255);
        }
        return largest / 65535;
    }
    template <int D>
    static void transpose(const int8_t* keys, int64_t stride, int n, float* to) {
        transpose_keys<D / 4>((const float*)keys, stride / 4, n, to);
        for (int i = 0; i < D / 4 * TILE; i += W) store(to + i, (vec)((ivec)load(to + i) ^ (int32_t)0x80808080));
    }
    template <int D>
    static void interleave(const int8_t* values, int64_t stride, int n, float* to) {
        for (int s = 0; s < TILE; s += 4, to += D)
            for (int d = 0; d < D; d += 64) {
                __m512i x[4];
                for (int i = 0; i < 4; ++i)
                    x[i] = s + i < n ? _mm512_loadu_si512(values + (s + i) * stride + d) : __m512i{};
                const __m512i low[2] = {_mm512_unpacklo_epi8(x[0], x[1]), _mm512_unpacklo_epi8(x[2], x[3])};
                const __m512i high[2] = {_mm512_unpackhi_epi8(x[0], x[1]), _mm512_unpackhi_epi8(x[2], x[3])};
                _mm512_storeu_si512(to + d, _mm512_unpacklo_epi16(low[0], low[1]));
                _mm512_storeu_si512(to + d + W, _mm512_unpackhi_epi16(low[0], low[1]));
                _mm512_storeu_si512(to + d + 2 * W, _mm512_unpacklo_epi16(high[0], high[1]));
                _mm512_storeu_si512(to + d + 3 * W, _mm512_unpackhi_epi16(high[0], high[1]));
            }
    }
};
#endif

// The place of a dimension in sums over interleaved values: words of 4 dimensions stay together.
template <int PACK>
inline int interleaved(int d) {
    const int in = d % (16 * PACK);
    return d - in + in / 4 % PACK * 16 + in / (4 * PACK) * 4 + in % 4;
}

// Prefetches a few lines of the next tile at a time into L2, during the arithmetic: prefetching all lines at once would
// fill the queue of misses, and memory and arithmetic would take turns.
struct Ahead {
    const char* at;
    int step;  // bytes per call
    void ask(int i) const {
        for (int line = 0; line < step; line += 64) __builtin_prefetch(at + i * step + line, 0, 2);
    }
};

// Computes scores of N query rows against a tile, as multiples of log2(e). q: words, by row and plane.
template <int N, int D, typename P>
inline void tile_scores(const float* q, const float* keys_t, const float* steps, const int32_t* taken_off,
                        const Ahead* ahead, float* scores) {
    constexpr int WORDS = D / P::PACK;
    typename P::Sum acc[N][2] = {};
#pragma GCC unroll 2
    for (int plane = 0; plane < P::PLANES; ++plane) {
        if (plane)
#pragma GCC unroll 8
            for (int m = 0; m < N; ++m)
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) acc[m][half] = (typename P::Sum)((ivec)acc[m][half] << P::KEY_SHIFT);
        for (int d = 0; d < WORDS; ++d) {
            const vec k0 = load(keys_t + d * TILE), k1 = load(keys_t + d * TILE + W);
            if (ahead && !plane) ahead->ask(d);
#pragma GCC unroll 8
            for (int m = 0; m < N; ++m) {
                const float word = q[(m * P::PLANES + plane) * WORDS + d];
                acc[m][0] = P::times_query(acc[m][0], k0, word);
                acc[m][1] = P::times_query(acc[m][1], k1, word);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            vec x;
            if constexpr (P::PLANES > 1)
                x = __builtin_convertvector(acc[m][half] - taken_off[m], vec);
            else
                x = acc[m][half];
            store(scores + m * TILE + half * W, x * broadcast(steps[m]));
        }
}

// out += weights * values, for N query rows and 4 vectors of the head dimension at a time.
template <int N, int D, typename P>
inline void tile_values(const float* weights, const float* values, const float* steps, const Ahead* ahead, float* out) {
    constexpr int V = D / W < 4 ? D / W : 4, WORDS = TILE / P::PACK;
    for (int at = 0; at < D; at += V * W) {
        typename P::Sum acc[N][V] = {};
        if constexpr (P::PLANES == 1) {
#pragma GCC unroll 8
            for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) acc[m][v] = load(out + m * D + at + v * W);
        }
#pragma GCC unroll 2
        for (int plane = 0; plane < P::PLANES; ++plane) {
            if (plane)
#pragma GCC unroll 8
                for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) acc[m][v] = (typename P::Sum)((ivec)acc[m][v] << P::VALUE_SHIFT);
            for (int s = 0; s < WORDS; ++s) {
                vec x[V];
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) x[v] = load(values + s * D + at + v * W);
                if (ahead && !plane && !at) ahead->ask(s);
#pragma GCC unroll 8
                for (int m = 0; m < N; ++m) {
                    const float word = weights[(m * P::PLANES + plane) * WORDS + s];
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) acc[m][v] = P::times_weight(acc[m][v], x[v], word);
                }
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                float* to = out + m * D + at + v * W;
                if constexpr (P::PLANES > 1)
                    store(to, load(to) + __builtin_convertvector(acc[m][v], vec) * broadcast(steps[m]));
                else
                    store(to, acc[m][v]);
            }
    }
}

// Calls `pass(row, size)` over all rows, in passes of ROWS and then of fewer.
template <int N = ROWS, typename Pass>
inline void in_passes(int row, int n_row, const Pass& pass) {
    for (; row + N <= n_row; row += N) pass(row, std::integral_constant<int, N>{});
    if constexpr (N > 1) in_passes<N - 1>(row, n_row, pass);
}

// Queries and entries. rows: the row of entries that each row of queries attends to; null: the row of the same number.
struct Read {
    const void* q;
    const int64_t* rows;
    const void *keys, *values;
    const float *key_scales, *value_scales;
    const int64_t *slots, *newest;  // positions of slots [batch, n_slot], and of queries [batch, n_token]
    const uint8_t *key_codes, *value_codes;  // the fields of Packed, and the positions of its slots; or null
    const bfloat16 *key_grids, *value_grids;
    const int64_t* packed_slots;
};

// The entries of a row and head as they are stored. scales: those of entries in 8 bits, else null.
template <int D, typename Entry, typename P>
struct Stored {
    const Entry *keys, *values;
    int64_t key_stride, value_stride;
    const float *key_scales, *value_scales;
    int64_t scale_stride;
    // The words and factors of the block's queries, then buffers for a tile.
    alignas(64) float q[BLOCK * P::PLANES * D / P::PACK], steps[BLOCK], weight_steps[BLOCK];
    int32_t taken_off[BLOCK];
    alignas(64) float tile[TILE * D / P::PACK], weight_words[BLOCK * P::PLANES * TILE / P::PACK], scales[TILE];

    Stored(const Entry* keys, const Entry* values, int64_t key_stride, int64_t value_stride, const float* key_scales,
           const float* value_scales, int64_t scale_stride)
        : keys(keys), values(values), key_stride(key_stride), value_stride(value_stride), key_scales(key_scales),
          value_scales(value_scales), scale_stride(scale_stride) {}
    // queries: [n_row, D] float32, as stored; scale: turns their products with keys into multiples of log2(e).
    void take(const float* queries, int n_row, float scale) {
        for (int m = 0; m < n_row; ++m) {
            P::template pack_query<D>(queries + m * D, q + m * P::PLANES * D / P::PACK, steps[m], taken_off[m]);
            steps[m] *= scale;
        }
    }
    void multiply(const float* by, int64_t start, int n, int n_row, float* weights) {
        for (int s = 0; s < TILE; ++s) scales[s] = s < n ? by[(start + s) * scale_stride] : 0;
        for (int m = 0; m < n_row; ++m)
            for (int s = 0; s < TILE; s += W) store(weights + m * TILE + s, load(weights + m * TILE + s) * load(scales + s));
    }
    void score_tile(int n_row, const Ahead* next, float* weights) {
        in_passes(0, n_row, [&](int m, auto size) {
            tile_scores<size, D, P>(q + m * P::PLANES * D / P::PACK, tile, steps + m, taken_off + m, m ? nullptr : next,
                                    weights + m * TILE);
        });
    }
    void add_tile(const float* weights, int n_row, const Ahead* next, float* out) {
        constexpr int WORDS = P::PLANES * TILE / P::PACK;
        for (int m = 0; m < n_row; ++m) weight_steps[m] = P::pack_weights(weights + m * TILE, weight_words + m * WORDS);
        in_passes(0, n_row, [&](int m, auto size) {
            tile_values<size, D, P>(weight_words + m * WORDS, tile, weight_steps + m, m ? nullptr : next, out + m * D);
        });
    }
    // Computes the scores of all query rows against the n slots of a tile, to [n_row, TILE].
    void scores(int n_row, int64_t start, int n, float* weights) {
        const Entry* from = keys + start * key_stride;
        P::template transpose<D>(from, key_stride, n, tile);
        const Ahead next{(const char*)(from + TILE * key_stride), TILE * P::PACK * (int)sizeof(Entry)};
        score_tile(n_row, &next, weights);
        if (key_scales) multiply(key_scales, start, n, n_row, weights);
    }
    void add(float* weights, int n_row, int64_t start, int n, float* out) {
        const Entry* from = values + start * value_stride;
        if (value_scales) multiply(value_scales, start, n, n_row, weights);
        P::template interleave<D>(from, value_stride, n, tile);
        const Ahead next{(const char*)(from + TILE * value_stride), D * P::PACK * (int)sizeof(Entry)};
        add_tile(weights, n_row, &next, out);
    }
    void finish(int n_row, float* out) {
        if (P::PACK == 1) return;
        for (int m = 0; m < n_row; ++m, out += D) {
            float sums[D];
            std::memcpy(sums, out, sizeof sums);
            for (int d = 0; d < D; ++d) out[d] = sums[interleaved<P::PACK>(d)];
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

    In4Bits(const Read& read, int64_t row, int64_t head, const Layout& at)
        : Stored<D, float, Float32Products>(nullptr, nullptr, 0, 0, nullptr, nullptr, 0),
          key_codes(read.key_codes + row * at.key_code_row + head * at.key_code_head),
          value_codes(read.value_codes + row * at.value_code_row + head * at.value_code_head),
          key_low(read.key_grids + row * at.key_grid_row + head * at.key_grid_head), key_step(key_low + at.key_grid_both),
          value_low(read.value_grids + row * at.value_grid_row + head * at.value_grid_head),
          value_step(value_low + at.value_grid_both), group(at.packed_group), n_value_grid(at.n_value_grid),
          value_grid_part(at.value_grid_part) {}

    static void unpack(const uint8_t* codes, vec (&halves)[2]) {
        ubvec bytes;
        std::memcpy(&bytes, codes, sizeof bytes);
        halves[0] = __builtin_convertvector(__builtin_convertvector(bytes & 15, ivec), vec);
        halves[1] = __builtin_convertvector(__builtin_convertvector(bytes >> 4, ivec), vec);
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
        this->score_tile(n_row, nullptr, weights);
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
        this->add_tile(weights, n_row, nullptr, out);
    }
};

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

inline bool any(ivec x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#else
    int32_t found = 0;
    for (int lane = 0; lane < W; ++lane) found |= x[lane];
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
            if (any(top > broadcast(largest[m]))) {
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
void attend(const Layout& at, const Read& read, float* workspace, void* out, float* chunk_scores,
            int n_thread) {
    const int64_t n_own = (at.n_slot + at.part - 1) / at.part, n_part = n_own + (at.n_packed + at.part - 1) / at.part;
    const int64_t n_row = at.n_token * at.group, n_block = (n_row + BLOCK - 1) / BLOCK;
    const int64_t n_head = at.batch * at.n_kv_head, n_task = n_head * n_part * n_block;
    const int64_t per_part = n_row * (D + 2), n_chunk = (at.n_slot + SCORED - 1) / SCORED;
    const int64_t n_kept = (n_chunk + W - 1) / W * W;
    const float scale = 1.4426950408889634f / std::sqrt((float)D);  // log2(e)
    const std::unique_ptr<float[]> scores(chunk_scores ? new float[n_head * n_row * n_kept] : nullptr);
#pragma omp parallel num_threads(n_thread)
    {
        std::vector<int64_t> older(at.part);
        alignas(64) float queries[BLOCK * D];
        Sight sees[BLOCK];
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < n_task; ++task) {
            const int64_t head = task / n_block / n_part, part = task / n_block % n_part, block = task % n_block * BLOCK;
            const int64_t row = head / at.n_kv_head, kv_head = head % at.n_kv_head;
            const int64_t stored = read.rows ? read.rows[row] : row;
            const int n = (int)std::min<int64_t>(BLOCK, n_row - block);
            for (int m = 0; m < n; ++m) {
                const int64_t token = (block + m) / at.group, of_group = (block + m) % at.group;
                const int64_t newest = read.newest[row * at.n_token + token];
                sees[m] = {at.window ? std::max<int64_t>(0, newest - at.window + 1) : 0, newest};
                const int64_t q_head = kv_head * at.group + of_group;
                copy_row(read.q, row * at.q_row + token * at.q_token + q_head * at.q_head, at.q_is_bfloat16,
                         queries + m * D, D);
            }
            const auto attend_to = [&](auto& own, const int64_t* slots, int64_t first, int64_t last) {
                float *sums = workspace + (head * n_part + part) * per_part, *largest = sums + n_row * D + block;
                own.take(queries, n, scale);
                attend_part<D>(own, n, slots, sees, first, last,
                               chunk_scores ? scores.get() + (head * n_row + block) * n_kept : nullptr, n_kept,
                               sums + block * D, largest, largest + n_row);
            };
            if (part < n_own) {
                const int64_t scale_at = stored * at.scale_row + kv_head * at.scale_head, first = part * at.part;
                Stored<D, Entry, P> own((const Entry*)read.keys + stored * at.key_row + kv_head * at.key_head,
                                        (const Entry*)read.values + stored * at.value_row + kv_head * at.value_head,
                                        at.key_slot, at.value_slot,
                                        read.key_scales ? read.key_scales + scale_at : nullptr,
                                        read.value_scales ? read.value_scales + scale_at : nullptr, at.scale_slot);
                attend_to(own, read.slots + row * at.n_slot + first, first, std::min(first + at.part, at.n_slot));
                continue;
            }
            const int64_t first = (part - n_own) * at.part, last = std::min(first + at.part, at.n_packed);
            without_recent(read.packed_slots + row * at.n_packed, read.slots + row * at.n_slot, at.n_slot, first, last,
                           older.data());
            In4Bits<D> own(read, stored, kv_head, at);
            attend_to(own, older.data(), first, last);
        }
    }
#pragma omp parallel for num_threads(n_thread) collapse(2) if (n_head * n_row >= 4096)
    for (int64_t head = 0; head < n_head; ++head)
        for (int64_t m = 0; m < n_row; ++m) {
            const float* partials = workspace + head * n_part * per_part;
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
            const int64_t q_head = head % at.n_kv_head * at.group + m % at.group;
            copy_row(sums, out, ((row * at.n_token + token) * at.n_kv_head * at.group + q_head) * D, at.q_is_bfloat16, D);
            workspace[head * n_part * per_part + n_row * D + m] = highest + std::log2(total * at.group);
        }
    if (!chunk_scores) return;
#pragma omp parallel for num_threads(n_thread) schedule(static)
    for (int64_t task = 0; task < n_head * at.n_token; ++task) {
        const int64_t token = task % at.n_token, head = task / at.n_token, m = token * at.group;
        const int64_t row = head / at.n_kv_head, stored = read.rows ? read.rows[row] : row;
        write_shares(scores.get() + (head * n_row + m) * n_kept, n_kept, at.group,
                    workspace + head * n_part * per_part + n_row * D + m, n_chunk,
                    chunk_scores + stored * at.scores_row + token * at.scores_token + head % at.n_kv_head * at.scores_head);
    }
}

// Calls `run` with the head dimension, and the types of entries and of their products. entries: 0 float, 1 bfloat16,
// 2 int8, 3 float8. Returns 0, or 1 if there is no such kernel.
template <typename Run>
int with_types(int64_t head_dim, bool q_is_bfloat16, int64_t entries, const Run& run) {
    const auto with = [&](auto entry, auto products) {
        if (head_dim == 64) return run(std::integral_constant<int, 64>{}, entry, products), 0;
        if (head_dim == 128) return run(std::integral_constant<int, 128>{}, entry, products), 0;
        return 1;
    };
    if (entries == 0) return with(float{}, Float32Products{});
#if defined(BFLOAT16_PRODUCTS)
    // Queries in float32 would be rounded.
    if (entries == 1 && q_is_bfloat16) return with(bfloat16{}, Bfloat16Products{});
#endif
    if (entries == 1) return with(bfloat16{}, Float32Products{});
#if defined(INT8_PRODUCTS)
    if (entries == 2) return with(int8_t{}, Int8Products{});
#else
    if (entries == 2) return with(int8_t{}, Float32Products{});
#endif
    return entries == 3 ? with(float8{}, Float32Products{}) : 1;
}

// Writes to [n_chosen] the entries before `end` in the chunks of largest share [n_chunk]: always the first n_first
// entries, then chunk by chunk, of equal chunks the first. If the text has fewer entries, the rest is 0.
inline void best_chunks(const float* share, int64_t n_chunk, int64_t chunk, int64_t end, int64_t n_first,
                        int64_t n_chosen, std::vector<uint32_t>& ranks, std::vector<int64_t>& best, int64_t* chosen) {
    n_chunk = std::min(n_chunk, (std::max<int64_t>(end, 0) + chunk - 1) / chunk);
    // Floats that are not negative have the order of their bits.
    std::memcpy(ranks.data(), share, n_chunk * sizeof(float));
    std::fill_n(ranks.begin(), std::min(n_first / chunk, n_chunk), UINT32_MAX);
    // The upper 22 bits of the lowest rank among the n_left highest, found 11 bits at a time.
    uint32_t lowest = 0, known = 0;
    int64_t n_left = std::min(n_chunk, (n_chosen + chunk - 1) / chunk + 1);
    for (const int shift : {21, 10}) {
        int32_t count[0x800] = {};
        for (int64_t i = 0; i < n_chunk; ++i)
            if ((ranks[i] & known) == lowest) ++count[ranks[i] >> shift & 0x7ff];
        uint32_t at = 0x7ff;
        for (; at > 0 && count[at] < n_left; --at) n_left -= count[at];
        lowest |= at << shift, known |= 0x7ffu << shift;
    }
    best.clear();
    for (int64_t i = 0; i < n_chunk; ++i)
        if (ranks[i] >= lowest) best.push_back(i);
    std::stable_sort(best.begin(), best.end(), [&](int64_t a, int64_t b) { return ranks[a] > ranks[b]; });
    int64_t n = 0;
    for (const int64_t i : best)
        for (int64_t slot = i * chunk; slot < std::min(end, (i + 1) * chunk) && n < n_chosen; ++slot) chosen[n++] = slot;
    std::fill(chosen + n, chosen + n_chosen, 0);
}

// Assigns chosen slots to places. A slot that has a place keeps it, which is then EMPTY in `chosen`; new slots get places
// whose slot was not chosen again. sizes: rows, heads, slots chosen, slots; source_slots: [all rows, heads, places].
void keep_chosen(const int64_t* sizes, int64_t* source_slots, const int64_t* rows, int64_t* chosen, const bool* is_new,
                 int n_thread) {
    const int64_t n_head = sizes[1], n = sizes[2];
#pragma omp parallel num_threads(n_thread)
    {
        std::vector<char> is_missing(sizes[3]), stays(n);
        std::vector<int64_t> missing(n);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < sizes[0] * n_head; ++task) {
            if (!is_new[task / n_head]) continue;
            int64_t *sources = source_slots + (rows[task / n_head] * n_head + task % n_head) * n;
            int64_t *slots = chosen + task * n, count = 0;
            for (int64_t i = 0; i < n; ++i) is_missing[slots[i]] = 1;
            for (int64_t i = 0; i < n; ++i) {
                stays[i] = sources[i] != EMPTY && is_missing[sources[i]];
                if (stays[i]) is_missing[sources[i]] = 0;
            }
            for (int64_t i = 0; i < n; ++i)
                if (is_missing[slots[i]]) {
                    is_missing[slots[i]] = 0;
                    missing[count++] = slots[i];
                }
            for (int64_t i = 0; i < n; ++i) slots[i] = stays[i] ? EMPTY : sources[i] = missing[--count];
        }
    }
}

// Copies vectors of `size` elements from the chosen slots of each row and head to the first slots of the target, in rows
// that are new, except where a slot is EMPTY. Strides are those of keys and values, rows, heads and slots.
template <typename From, typename To>
void copy_chosen(const int64_t* sizes, const From* from, To* to, const int64_t* from_rows, const int64_t* to_rows,
                 const int64_t* chosen, const bool* is_new, int n_thread) {
    const int64_t batch = sizes[0], n_head = sizes[1], n = sizes[2], size = sizes[3], *step = sizes + 4, *put = sizes + 8;
#pragma omp parallel for num_threads(n_thread) schedule(dynamic, 1)
    for (int64_t task = 0; task < 2 * batch * n_head; ++task) {
        const int64_t both = task / (batch * n_head), row = task / n_head % batch, head = task % n_head;
        if (!is_new[row]) continue;
        const From* source = from + both * step[0] + from_rows[row] * step[1] + head * step[2];
        To* target = to + both * put[0] + to_rows[row] * put[1] + head * put[2];
        const int64_t* slots = chosen + (row * n_head + head) * n;
        for (int64_t i = 0; i < n; ++i, target += put[3]) {
            if (slots[i] == EMPTY) continue;
            const From* ahead = source + std::max<int64_t>(slots[std::min(i + 8, n - 1)], 0) * step[3];
            for (int64_t d = 0; d < size; d += 64 / sizeof(From)) __builtin_prefetch(ahead + d);
            const From* vector = source + slots[i] * step[3];
            for (int64_t d = 0; d < size; ++d) target[d] = To(vector[d]);
        }
    }
}

}  // namespace

// q and out: float, or bfloat16 as the layout says; out [batch, tokens, heads, head_dim]. 8-bit entries have scales.
// chunk_scores: `KV.chunk_scores`, or null. key_codes to packed_slots: the fields of Packed, or null; with them, `slots`
// has the positions in the ring of recent tokens.
extern "C" int foretoken_attend(const int64_t* layout, int64_t head_dim, int64_t entries, const void* q,
                                const int64_t* rows, const void* keys, const void* values, const float* key_scales,
                                const float* value_scales, const int64_t* slots, const int64_t* newest,
                                const uint8_t* key_codes, const uint8_t* value_codes, const void* key_grids,
                                const void* value_grids, const int64_t* packed_slots, float* workspace, void* out,
                                float* chunk_scores, int n_thread) {
    Layout at;
    std::memcpy(&at, layout, sizeof at);
    const Read read{q, rows, keys, values, key_scales, value_scales, slots, newest, key_codes, value_codes,
                    (const bfloat16*)key_grids, (const bfloat16*)value_grids, packed_slots};
    return with_types(head_dim, at.q_is_bfloat16, entries, [&](auto size, auto entry, auto products) {
        attend<size, decltype(entry), decltype(products)>(at, read, workspace, out, chunk_scores, n_thread);
    });
}

// sizes: rows, heads, chunks, strides of the share's rows and heads, entries of a chunk, entries chosen, and entries that
// are always chosen. share [rows, heads, chunks]; ends: the end of each row's entries.
extern "C" int foretoken_best_chunks(const int64_t* sizes, const float* share, const int64_t* ends, int64_t* chosen,
                                     int n_thread) {
#pragma omp parallel num_threads(n_thread)
    {
        std::vector<uint32_t> ranks(sizes[2]);
        std::vector<int64_t> best;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < sizes[0] * sizes[1]; ++task) {
            const int64_t row = task / sizes[1], head = task % sizes[1];
            best_chunks(share + row * sizes[3] + head * sizes[4], sizes[2], sizes[5], ends[row], sizes[7], sizes[6], ranks,
                        best, chosen + task * sizes[6]);
        }
    }
    return 0;
}

extern "C" int foretoken_keep_chosen(const int64_t* sizes, int64_t* source_slots, const int64_t* rows, int64_t* chosen,
                                     const bool* is_new, int n_thread) {
    keep_chosen(sizes, source_slots, rows, chosen, is_new, n_thread);
    return 0;
}

// sizes: rows, heads, slots, elements, then strides of the source and of the target. narrows: converts float to bfloat16;
// else elements of item_size bytes are copied.
extern "C" int foretoken_copy_chosen(const int64_t* sizes, int64_t item_size, int64_t narrows, const void* from, void* to,
                                     const int64_t* from_rows, const int64_t* to_rows, const int64_t* chosen,
                                     const bool* is_new, int n_thread) {
    const auto copy = [&](auto read, auto written) {
        copy_chosen(sizes, (const decltype(read)*)from, (decltype(written)*)to, from_rows, to_rows, chosen, is_new, n_thread);
        return 0;
    };
    if (narrows) return copy(float{}, bfloat16{});
    if (item_size == 4) return copy(float{}, float{});
    return item_size == 2 ? copy(bfloat16{}, bfloat16{}) : copy(int8_t{}, int8_t{});
}
