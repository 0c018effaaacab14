// Products of entries with queries and with softmax weights, over words of 32 bits.
#pragma once

#include <type_traits>

#include "models/attention/vectors.hpp"

namespace {

constexpr int TILE = 2 * W;  // slots per tile

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

}  // namespace
