// Vectors of 64-bit lanes for the CPU kernels of sampling. AVX2 cannot convert between float64 and 64-bit integers, so a
// large number is added whose last bit is worth 1: the low bits of the sum are the integer.
#pragma once

#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 8;  // lanes of a vector
#elif defined(__AVX2__)
constexpr int W = 4;
#else
constexpr int W = 2;
#endif

typedef uint64_t words __attribute__((vector_size(8 * W)));
typedef int64_t longs __attribute__((vector_size(8 * W)));
typedef double doubles __attribute__((vector_size(8 * W)));
typedef float floats __attribute__((vector_size(4 * W)));

constexpr double LAST_BIT_1 = 0x1.8p52;

inline doubles number(double x) { return x - doubles{}; }

// Return integers below 2^52 as float64.
inline doubles number_of(words x) { return (doubles)(x | 0x4330000000000000) - number(0x1p52); }

// Return the nearest integers, |x| < 2^51, as float64 or as integers.
inline doubles rounded(doubles x) { return x + number(LAST_BIT_1) - number(LAST_BIT_1); }
inline longs integer_of(doubles x) { return (longs)(x + number(LAST_BIT_1)) - (longs)number(LAST_BIT_1); }

// Return the products of integers below 2^32 and y.
inline words product(words x, uint32_t y) {
#if defined(__AVX512F__)
    return (words)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(y));
#elif defined(__AVX2__)
    return (words)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(y));
#else
    return x * (uint64_t)y;
#endif
}

}  // namespace
