// Products of entries with queries and with softmax weights, over words of 32 bits.
#pragma once

#include "models/kernels/vectors.hpp"

namespace {

constexpr int TILE = 2 * W;  // slots per tile

// Calls f with the constants 0 to N - 1.
template <int N, typename F>
inline void each(const F& f) {
    if constexpr (N > 1) each<N - 1>(f);
    f(std::integral_constant<int, N - 1>{});
}

// Prefetches a tile into L2 evenly over the arithmetic of all query rows: many lines at once would fill the queue of
// misses, and memory and arithmetic would take turns.
struct Ahead {
    const char *at, *until;
    int64_t per_row, step = 0;  // bytes per query row, and per call of `ask`

    Ahead(const void* tile, int64_t bytes, int n_row)
        : at((const char*)tile), until(at), per_row((bytes + n_row - 1) / n_row) {}
    // Starts the arithmetic of n_row query rows, which calls `ask` n_call times.
    void begin(int n_row, int n_call) { step = (per_row * n_row + n_call - 1) / n_call; }
    void ask() {
        for (until += step; at < until; at += 64) __builtin_prefetch(at, 0, 2);
    }
};

// Transposes a tile of n keys of n_word words to [N, TILE]. Words of missing keys, and after n_word, are 0.
template <int N, bool WHOLE = false, typename Entry>
inline void transpose_keys(const Entry* keys, int64_t stride, int n, int n_word, float* to) {
    if constexpr (!WHOLE)
        if (n == TILE && n_word == N) return transpose_keys<N, true>(keys, stride, n, n_word, to);
    for (int block = 0; block < TILE; block += W)
        for (int d = 0; d < N; d += W) {
            vec r[W];
            for (int s = 0; s < W; ++s)
                r[s] = WHOLE ? load(keys + (block + s) * stride + d)
                             : block + s < n ? load_first(keys + (block + s) * stride + d, n_word - d) : vec{};
            exchange<W / 2>(r);
            for (int i = 0; i < W; ++i) store(to + (d + i) * TILE + block, r[i]);
        }
}

// Products of entries with queries and with softmax weights, over words of PACK numbers. Queries and weights may be split
// into PLANES, from the most significant to the least. A word of entries holds PACK * APART numbers; APART of them
// are multiplied in turn. ROWS: the most query rows of a pass, whose sums fill the registers. FLIPPED: the bits of a
// key's word that are inverted.
//
// pack_query: computes the words [PLANES, D / PACK] of a query, the factor of its sums, and a number to subtract first.
// pack_weights: computes the words [PLANES, TILE / PACK] of a tile's weights, and the factor of their sums.
// interleave: rearranges the words of a tile's n values, N each, in the order of dimensions of `interleaved`. Words after
// n_word are 0.
struct Products {
    static constexpr bool IN_AMX = false;
    static constexpr int PACK = 1, APART = 1, PLANES = 1, ROWS = 6, KEY_SHIFT = 0, VALUE_SHIFT = 0;
    static constexpr uint32_t FLIPPED = 0;

    template <int PART>
    static vec part(vec words) { return words; }
};

struct Float32Products : Products {
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
    template <int N, typename Word>
    static void interleave(const Word* values, int64_t stride, int n, int n_word, float* to) {
        if (n == TILE && n_word == N) {
            for (int s = 0; s < TILE; ++s)
                for (int d = 0; d < N; d += W) store(to + s * N + d, load(values + s * stride + d));
            return;
        }
        for (int s = 0; s < n; ++s)
            for (int d = 0; d < N; d += W) store(to + s * N + d, load_first(values + s * stride + d, n_word - d));
        std::memset(to + n * N, 0, (TILE - n) * N * sizeof(float));
    }
};

// Entries in bfloat16, moved as words of two, and multiplied in float32.
struct WidenedProducts : Float32Products {
    static constexpr int APART = 2, ROWS = REGISTERS == 32 ? 12 : 4;

    template <int PART>
    static vec part(vec words) { return PART ? upper_bfloat16((uvec)words) : lower_bfloat16((uvec)words); }
};

#if defined(__AVX2__) || defined(AMX)
// In blocks of 16 bytes, takes numbers in turns from the first (or, if OTHER, the second) halves of two vectors.
template <typename Number, bool OTHER>
inline vec mixed(vec a, vec b) {
    typedef Number numbers __attribute__((vector_size(4 * W)));
    constexpr int N = 16 / sizeof(Number), ALL = 4 * W / sizeof(Number);
    numbers at;
    for (int i = 0; i < ALL; ++i) at[i] = i / N * N + i % N / 2 + (OTHER ? N / 2 : 0) + (i % 2 ? ALL : 0);
    return (vec)__builtin_shuffle((numbers)a, (numbers)b, at);
}

// Words of two bfloat16: weights and queries are rounded to bfloat16.
struct Bfloat16Words : Products {
    static constexpr int PACK = 2;

    static void pack(const float* from, float* words) {
#if defined(__AVX512BF16__)
        const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)load(from + W), (__m512)load(from));
#else
        bfloat16 pairs[2 * W];
        for (int i = 0; i < 2 * W; ++i) pairs[i] = bfloat16(from[i]);
#endif
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
    template <int N>
    static void interleave(const float* values, int64_t stride, int n, int n_word, float* to) {
        for (int s = 0; s < TILE; s += 2)
            for (int d = 0; d < N; d += W, to += 2 * W) {
                vec x[2];
                for (int i = 0; i < 2; ++i) x[i] = s + i < n ? load_first(values + (s + i) * stride + d, n_word - d) : vec{};
                store(to, mixed<uint16_t, false>(x[0], x[1]));
                store(to + W, mixed<uint16_t, true>(x[0], x[1]));
            }
    }
};

// Words of four int8. Queries are rounded to 15 bits, in planes of 8 and 7, and a tile's weights to 16, in two planes of
// 8, relative to the largest.
struct Int8Words : Products {
    static constexpr int PACK = 4, PLANES = 2, KEY_SHIFT = 7, VALUE_SHIFT = 8;

    // Returns the step of a query's numbers in 15 bits; NaN if one is not finite.
    template <int D>
    static float step_of(const float* q) {
        vec top{}, nothing{};  // `nothing` becomes NaN after a number that is not finite
        for (int d = 0; d < D; d += W) {
            top = larger(top, larger(load(q + d), -load(q + d)));
            nothing += load(q + d) * broadcast(0);
        }
        return largest_lane(top) / (127 << 7) + sum_of_lanes(nothing);
    }
    // taken_off: what the products exceed by if keys count from -128.
    template <int D>
    static void pack_query(const float* q, float* words, float& step, int32_t& taken_off) {
        step = step_of<D>(q);
        const vec inverse = broadcast(step > 0 ? 1 / step : 0);
        ivec sum{};
        for (int d = 0; d < D; d += W) {
            const ivec x = nearest(load(q + d) * inverse);
            const ivec first = (x + (1 << (KEY_SHIFT - 1))) >> KEY_SHIFT;
            store_bytes((int8_t*)words + d, first);
            store_bytes((int8_t*)words + D + d, x - (first << KEY_SHIFT));
            sum += x;
        }
        taken_off = 128 * sum_of_lanes((uvec)sum);
    }
    static float pack_weights(const float* weights, float* words) {
        const float largest = largest_lane(larger(load(weights), load(weights + W)));
        const vec inverse = broadcast(largest > 0 ? 65535 / largest : 0);
        for (int s = 0; s < TILE; s += W) {
            const ivec x = nearest(load(weights + s) * inverse);
            store_bytes((uint8_t*)words + s, x >> VALUE_SHIFT);
            store_bytes((uint8_t*)words + TILE + s, x & 255);
        }
        return largest / 65535;
    }
    template <int N>
    static void interleave(const float* values, int64_t stride, int n, int n_word, float* to) {
        for (int s = 0; s < TILE; s += 4)
            for (int d = 0; d < N; d += W, to += 4 * W) {
                vec x[4];
                for (int i = 0; i < 4; ++i) x[i] = s + i < n ? load_first(values + (s + i) * stride + d, n_word - d) : vec{};
                const vec low[2] = {mixed<uint8_t, false>(x[0], x[1]), mixed<uint8_t, false>(x[2], x[3])};
                const vec high[2] = {mixed<uint8_t, true>(x[0], x[1]), mixed<uint8_t, true>(x[2], x[3])};
                store(to, mixed<uint16_t, false>(low[0], low[1]));
                store(to + W, mixed<uint16_t, true>(low[0], low[1]));
                store(to + 2 * W, mixed<uint16_t, false>(high[0], high[1]));
                store(to + 3 * W, mixed<uint16_t, true>(high[0], high[1]));
            }
    }
};
#endif

#if !defined(AMX)  // amx_products.hpp defines both products in its way
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(WIDENED)
// Products in bfloat16, sums in float32.
struct Bfloat16Products : Bfloat16Words {
    typedef vec Sum;

    static Sum times_query(Sum sum, vec keys, float word) {
        return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)keys, (__m512bh)word_at(&word));
    }
    static Sum times_weight(Sum sum, vec values, float word) { return times_query(sum, values, word); }
};
#else
typedef WidenedProducts Bfloat16Products;
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
// Products in 8 bits, sums exact. The instruction takes an unsigned factor: keys count from -128.
struct Int8Products : Int8Words {
    static constexpr uint32_t FLIPPED = 0x80808080;
    typedef ivec Sum;

    static Sum times_query(Sum sum, vec keys, float word) {
        return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)keys, (__m512i)word_at(&word));
    }
    static Sum times_weight(Sum sum, vec values, float word) {
        return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)word_at(&word), (__m512i)values);
    }
};
#elif defined(__AVX2__) && !defined(__AVX512F__)
// Products of pairs in 16 bits, sums exact. A word has four dimensions of a key, or two dimensions of two values: its even
// bytes are multiplied, then its odd ones. Queries and a tile's weights are rounded to 15 bits.
struct Int8Products : Int8Words {
    static constexpr int PACK = 2, APART = 2, PLANES = 1, ROWS = 4;
    typedef ivec Sum;

    template <int PART>
    static vec part(vec words) {
        return (vec)_mm256_srai_epi16(PART ? (__m256i)words : _mm256_slli_epi16((__m256i)words, 8), 8);
    }
    static Sum times_query(Sum sum, vec keys, float word) {
        return sum + (ivec)_mm256_madd_epi16((__m256i)keys, (__m256i)broadcast(word));
    }
    static Sum times_weight(Sum sum, vec values, float word) { return times_query(sum, values, word); }

    // Rounds 2 * W numbers to 16 bits.
    static vec in_16_bits(vec first, vec second) {
        const __m256i by_halves = _mm256_packs_epi32((__m256i)nearest(first), (__m256i)nearest(second));
        return (vec)_mm256_permute4x64_epi64(by_halves, 0b11011000);
    }
    template <int D>
    static void pack_query(const float* q, float* words, float& step, int32_t& taken_off) {
        step = step_of<D>(q);
        taken_off = 0;
        const vec inverse = broadcast(step > 0 ? 1 / step : 0);
        for (int d = 0; d < D; d += 2 * W) {  // of four dimensions, the even ones come first
            const vec pairs = in_16_bits(load(q + d) * inverse, load(q + d + W) * inverse);
            const __m256i low = _mm256_shufflelo_epi16((__m256i)pairs, 0b11011000);
            store(words + d / 2, (vec)_mm256_shufflehi_epi16(low, 0b11011000));
        }
    }
    static float pack_weights(const float* weights, float* words) {
        const float largest = largest_lane(larger(load(weights), load(weights + W)));
        const vec inverse = broadcast(largest > 0 ? 32767 / largest : 0);
        store(words, in_16_bits(load(weights) * inverse, load(weights + W) * inverse));
        return largest / 32767;
    }
    template <int N>
    static void interleave(const float* values, int64_t stride, int n, int n_word, float* to) {
        Bfloat16Words::interleave<N>(values, stride, n, n_word, to);
    }
};
#else
typedef Float32Products Int8Products;
#endif
#endif

// The place of a dimension in sums over interleaved values: words of 4 dimensions stay together. Where the numbers of a
// word are multiplied in turn, those of W words that come first stand before the others.
template <typename P>
inline int interleaved(int d) {
    const int n = P::APART > 1 ? 2 * W * P::PACK : 16 * P::PACK, in = d % n;
    if (P::APART == 2 && P::PACK == 2) return d - in + in % 16 / 8 * 2 * W + in % 2 * W + in / 16 * 4 + in % 8 / 2;
    return d - in + (P::APART > 1 ? in % 2 * W + in / 2 : in / 4 % P::PACK * 16 + in / (4 * P::PACK) * 4 + in % 4);
}

}  // namespace
