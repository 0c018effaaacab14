// Vectors of 64-bit lanes for the CPU kernels of sampling. Conversions between float64 and integers, for which AVX2 has
// no instruction, are sums with numbers so large that their last digit is 1.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
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

constexpr double LAST_DIGIT_1 = 0x1.8p52;

inline doubles number(double x) { return x - doubles{}; }

// Of integers below 2^52.
inline doubles number_of(words x) { return (doubles)(x | 0x4330000000000000) - number(0x1p52); }

// To the nearest integer; |x| < 2^51.
inline doubles rounded(doubles x) { return x + number(LAST_DIGIT_1) - number(LAST_DIGIT_1); }
inline longs integer_of(doubles x) { return (longs)(x + number(LAST_DIGIT_1)) - (longs)number(LAST_DIGIT_1); }

// Of integers below 2^32.
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
