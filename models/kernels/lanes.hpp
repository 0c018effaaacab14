// W lanes of 32 bits, of AVX-512 or of AVX2, for linear_kernel.cpp, which includes this in its namespace.
#pragma once

// Weights in 8 bits are bytes around 128. CENTRE is what their products count as 0: AVX2 multiplies bytes around 0.
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
typedef __m512 Floats;
typedef __m512i Ints;
constexpr int W = 16, ROWS_16_AND_8 = 12, ROWS_4 = 6;  // ROWS: the most rows of x in a group, by the bits of a weight
constexpr uint32_t CENTRE = 128;

inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load(const bfloat16* p) {
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline void store(bfloat16* p, Floats x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
inline void store_bytes(int8_t* p, Ints x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x)); }  // saturated
inline Ints load_words(const char* p) { return _mm512_loadu_si512(p); }
inline Floats spread(float x) { return _mm512_set1_ps(x); }
inline Ints spread(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b, if one is NaN
inline float largest_lane(Floats x) { return _mm512_reduce_max_ps(x); }
inline float sum_of_lanes(Floats x) { return _mm512_reduce_add_ps(x); }
inline uint32_t sum_of_lanes(Ints x) { return _mm512_reduce_add_epi32(x); }
inline Ints nearest(Floats x) { return _mm512_cvtps_epi32(x); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints lower_codes(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Ints upper_codes(Ints x) { return lower_codes(_mm512_srli_epi16(x, 4)); }
inline Floats lower_bfloat16(Ints x) { return (Floats)_mm512_slli_epi32(x, 16); }
inline Floats upper_bfloat16(Ints x) { return (Floats)_mm512_and_si512(x, _mm512_set1_epi32(0xffff0000)); }

// Products in assembly: GCC 12 moves registers about around the intrinsic of the first.
inline void add_products(Ints& sum, Ints weights, Ints x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
}
inline void add_code_products(Ints& sum, Ints codes, Ints x) { add_products(sum, codes, x); }
inline Ints sums_of_codes(Ints sum) { return sum; }
#if !defined(WIDENED)
inline void add_products(Floats& sum, Ints weights, Ints x) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
}
#endif

#else
typedef __m256 Floats;
typedef __m256i Ints;
constexpr int W = 8, ROWS_16_AND_8 = 4, ROWS_4 = 4;
constexpr uint32_t CENTRE = 0;

inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline Floats load(const bfloat16* p) {
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline __m128i low_half(__m256i x) { return _mm256_castsi256_si128(x); }
inline __m128i high_half(__m256i x) { return _mm256_extracti128_si256(x, 1); }
inline void store(bfloat16* p, Floats x) {  // to the nearest, ties to even; a NaN stays one
    const Ints bits = (Ints)x, odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const Ints up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const Ints nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const Ints kept = (Ints)_mm256_blendv_ps((Floats)up, (Floats)nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const Ints upper = _mm256_srli_epi32(kept, 16);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(low_half(upper), high_half(upper)));
}
inline void store_bytes(int8_t* p, Ints x) {  // saturated
    const __m128i words = _mm_packs_epi32(low_half(x), high_half(x));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
inline Ints load_words(const char* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Floats spread(float x) { return _mm256_set1_ps(x); }
inline Ints spread(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats magnitude(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }  // b, if one is NaN
inline float largest_lane(Floats x) {
    float lanes[W];
    store(lanes, x);
    return *std::max_element(lanes, lanes + W);
}
inline float sum_of_lanes(Floats x) {
    float lanes[W];
    store(lanes, x);
    return std::accumulate(lanes, lanes + W, 0.0f);
}
inline uint32_t sum_of_lanes(Ints x) {
    uint32_t lanes[W];
    _mm256_storeu_si256((__m256i*)lanes, x);
    return std::accumulate(lanes, lanes + W, 0u);
}
inline Ints nearest(Floats x) { return _mm256_cvtps_epi32(x); }
inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Ints lower_codes(Ints x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Ints upper_codes(Ints x) { return lower_codes(_mm256_srli_epi16(x, 4)); }
inline Floats lower_bfloat16(Ints x) { return (Floats)_mm256_slli_epi32(x, 16); }
inline Floats upper_bfloat16(Ints x) { return (Floats)_mm256_and_si256(x, _mm256_set1_epi32(0xffff0000)); }

// 16 bits hold the sums of a group's codes, 16 products of 15 and 127, and those of two products of 127 and 127.
inline void add_code_products(Ints& sum, Ints codes, Ints x) { sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x)); }
inline Ints sums_of_codes(Ints sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
inline void add_products(Ints& sum, Ints weights, Ints x) {
    const Ints around_0 = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
    const Ints pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(around_0), _mm256_sign_epi8(x, around_0));
    sum = add(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#define WIDENED
#endif

inline Ints word_at(const void* p) {
    int32_t word;
    std::memcpy(&word, p, sizeof word);
    return spread(word);
}
