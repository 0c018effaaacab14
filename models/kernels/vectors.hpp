// Vectors of the CPU kernels: lanes, storage formats, and functions of whole vectors. Before it includes this, a kernel
// may define LANES, the lanes of a vector; else they are those of the processor's vectors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(LANES)
#elif defined(__AVX512F__) || defined(AMX)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

namespace {

constexpr int W = LANES, REGISTERS = W == 16 ? 32 : 16;  // lanes of a vector; vectors that a core holds
constexpr int64_t EMPTY = -1;  // the position of an empty slot; also a slot that does not exist
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t hvec __attribute__((vector_size(2 * W)));
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
// Return the first, or the second, bfloat16 of each word, as float32.
inline vec lower_bfloat16(uvec words) { return (vec)(words << 16); }
inline vec upper_bfloat16(uvec words) { return (vec)(words & 0xffff0000); }
// Loads a word into all lanes.
inline uvec word_at(const void* p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return word + uvec{};
}
// Loads W bytes as numbers of 32 bits. GCC 12 widens bytes in many steps.
template <typename Byte>
inline ivec widened(const Byte* p) {
#if defined(__AVX512F__) && LANES == 16
    const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    return (ivec)(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__) && LANES == 8
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
    return (ivec)(std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    typedef Byte Bytes __attribute__((vector_size(W)));
    Bytes bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, ivec);
#endif
}
inline vec load(const int8_t* p) { return __builtin_convertvector(widened(p), vec); }
// Moves exponent and mantissa to their places in float32, also of subnormals; 2^120 corrects the bias (127, not 7).
inline vec load(const float8* p) {
    const uvec bits = (uvec)widened(&p->bits);
    return (vec)((bits & 0x80) << 24 | (bits & 0x7f) << 20) * broadcast(0x1p120f);
}
// Loads the first numbers, up to n of them; the others are 0.
template <typename Number>
inline vec load_first(const Number* p, int n) {
#if defined(__AVX512F__) && LANES == 16
    if constexpr (std::is_same_v<Number, float>)
        return (vec)_mm512_maskz_loadu_ps(0xffffu >> (W - std::clamp(n, 0, W)), p);
#endif
    if (n >= W) return load(p);
    Number some[W] = {};
    for (int i = 0; i < n; ++i) some[i] = p[i];
    return load(some);
}
// Stores the lowest bytes of integers.
template <typename Byte>
inline void store_bytes(Byte* to, ivec x) {
#if defined(__AVX512F__) && LANES == 16
    const __m128i narrow = _mm512_cvtepi32_epi8((__m512i)x);
#else
    typedef Byte Bytes __attribute__((vector_size(W)));
    const Bytes narrow = __builtin_convertvector(x, Bytes);
#endif
    std::memcpy(to, &narrow, sizeof narrow);
}
// The nearest integers, ties to even, of numbers below 2^22.
inline ivec nearest(vec x) {
#if defined(__AVX512F__) && LANES == 16
    return (ivec)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__) && LANES == 8
    return (ivec)_mm256_cvtps_epi32((__m256)x);
#else
    return (ivec)(x + broadcast(12582912.0f)) - (ivec)broadcast(12582912.0f);
#endif
}
inline vec larger(vec a, vec b) { return a > b ? a : b; }  // b, if one is NaN

// A vector's lanes, folded in halves: S lanes are left to fold.
template <int S = W / 2, typename Vector, typename Fold>
inline auto across(Vector x, const Fold& fold) {
    ivec other;
    for (int lane = 0; lane < W; ++lane) other[lane] = lane ^ S;
    x = fold(x, __builtin_shuffle(x, other));
    if constexpr (S > 1) return across<S / 2>(x, fold);
    return x[0];
}
inline float largest_lane(vec x) { return across(x, [](vec a, vec b) { return larger(a, b); }); }
inline float sum_of_lanes(vec x) { return across(x, [](vec a, vec b) { return a + b; }); }
inline uint32_t sum_of_lanes(uvec x) { return across(x, [](uvec a, uvec b) { return a + b; }); }

// 2^x on [-1/2, 1/2], with an error below 2e-7.
inline vec exp2_of_rest(vec x) {
    vec p = broadcast(1.5403530393381609e-4f);
    p = p * x + broadcast(1.3333558146428443e-3f);
    p = p * x + broadcast(9.618129107628477e-3f);
    p = p * x + broadcast(5.550410866482158e-2f);
    p = p * x + broadcast(2.402265069591007e-1f);
    p = p * x + broadcast(6.931471805599453e-1f);
    return p * x + broadcast(1.0f);
}
// 2^x for x <= 0, and 0 in place of numbers below the normal ones: exact powers for the whole part of x.
inline vec exp2_of(vec x) {
#if defined(__AVX512DQ__) && LANES == 16
    const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_GT_OQ);
    const vec rest = (vec)_mm512_reduce_ps((__m512)x, 0);
    return (vec)_mm512_maskz_scalef_ps(is_normal, (__m512)exp2_of_rest(rest), (__m512)(x - rest));
#else
    x = larger(x, broadcast(-127.0f));
    const vec shifted = x + broadcast(12582912.0f);  // 1.5 * 2^23: rounds to whole numbers
    const vec result = exp2_of_rest(x - (shifted - broadcast(12582912.0f)));
    return x > broadcast(-126.0f) ? (vec)((uvec)result + ((uvec)shifted << 23)) : vec{};
#endif
}

// In-place transpose of W vectors: at each of log2(W) steps, halves of pairs are exchanged.
template <int S>
__attribute__((always_inline)) inline void exchange(vec* r) {
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

}  // namespace
