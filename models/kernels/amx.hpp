// Products of tiles by Intel's AMX: six operations, or their arithmetic in plain C++ with -DEMULATED.
//
// A tile has up to 16 rows of up to 64 bytes. Written as assembly, because the intrinsics of g++ 12 take literals as tile
// numbers, and do not keep loads behind the stores before them.
#pragma once

#include "models/kernels/vectors.hpp"
#if !defined(EMULATED)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace amx {
namespace {

// The shapes of tiles 0 to 7, as the processor reads them.
struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row
    uint8_t rows[16] = {};
};

#if !defined(EMULATED)
// Returns why this process cannot use tiles, or null. The first call asks the system for their registers.
inline const char* refusal() {
    static const char* const why = []() -> const char* {
        constexpr unsigned OSXSAVE = 1u << 27, AMX_BF16_TILE_INT8 = 1u << 22 | 1u << 24 | 1u << 25, TILE_STATES = 3u << 17;
        constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
        unsigned a, b, c, d, enabled, upper;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return "the system does not save registers of AMX";
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & AMX_BF16_TILE_INT8) != AMX_BF16_TILE_INT8)
            return "the CPU does not have AMX in bfloat16 and int8";
        asm volatile("xgetbv" : "=a"(enabled), "=d"(upper) : "c"(0));
        if ((enabled & TILE_STATES) != TILE_STATES) return "the system does not save registers of AMX";
        if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA)) return "the system does not permit AMX";
        return nullptr;
    }();
    return why;
}

inline void configure(const Shapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory"); }
inline void release() { asm volatile("tilerelease" : : : "memory"); }

template <int TO>
inline void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TO));
}
// stride: bytes from row to row, here and below.
template <int TO>
inline void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TO) : "memory");
}
template <int FROM>
inline void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(FROM) : "memory");
}
// SUM[m][n] += A[m][k] * B[k][n] over words k, each a pair of bfloat16; n counts words of 32 bits.
template <int SUM, int A, int B>
inline void multiply_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}
// Likewise with words of four int8, or of four uint8 in A or in B. Sums are exact, modulo 2^32.
template <int SUM, int A, int B, bool A_IS_UNSIGNED, bool B_IS_UNSIGNED = false>
inline void multiply_int8() {
    static_assert(!A_IS_UNSIGNED || !B_IS_UNSIGNED);
    if (A_IS_UNSIGNED) asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
    else if (B_IS_UNSIGNED) asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
    else asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}

#else
struct Tile {
    int rows, bytes;
    uvec at[16];
};
thread_local Tile tiles[8];

inline const char* refusal() { return nullptr; }

inline void configure(const Shapes& shapes) {
    for (int tile = 0; tile < 8; ++tile) tiles[tile] = {shapes.rows[tile], shapes.bytes[tile], {}};
}
inline void release() { configure(Shapes{}); }

template <int TO>
inline void zero() {
    std::memset(tiles[TO].at, 0, sizeof tiles[TO].at);
}
template <int TO>
inline void load(const void* from, int64_t stride) {
    zero<TO>();
    for (int row = 0; row < tiles[TO].rows; ++row)
        std::memcpy(&tiles[TO].at[row], (const char*)from + row * stride, tiles[TO].bytes);
}
template <int FROM>
inline void store(void* to, int64_t stride) {
    for (int row = 0; row < tiles[FROM].rows; ++row)
        std::memcpy((char*)to + row * stride, &tiles[FROM].at[row], tiles[FROM].bytes);
}

inline vec flushed(vec x) { return larger(x, -x) < broadcast(0x1p-126f) ? (vec)((uvec)x & 0x80000000) : x; }
// As the processor's manual has it: first and second halves are added up apart; numbers below the normal ones are 0.
template <int SUM, int A, int B>
inline void multiply_bfloat16() {
    vec first[16] = {}, second[16] = {};
    for (int k = 0; k < tiles[B].rows; ++k)
        for (int m = 0; m < tiles[SUM].rows; ++m) {
            const uvec a = tiles[A].at[m][k] + uvec{}, b = tiles[B].at[k];  // their products are exact
            first[m] = flushed(first[m] + flushed(lower_bfloat16(a)) * flushed(lower_bfloat16(b)));
            second[m] = flushed(second[m] + flushed(upper_bfloat16(a)) * flushed(upper_bfloat16(b)));
        }
    for (int m = 0; m < tiles[SUM].rows; ++m) {
        uvec& sum = tiles[SUM].at[m];
        sum = (uvec)flushed(flushed((vec)sum) + flushed(first[m] + second[m]));
    }
}
template <int SUM, int A, int B, bool A_IS_UNSIGNED, bool B_IS_UNSIGNED = false>
inline void multiply_int8() {
    for (int k = 0; k < tiles[A].bytes; ++k) {
        const uvec bytes = tiles[B].at[k / 4] << (24 - k % 4 * 8);
        const uvec b = B_IS_UNSIGNED ? bytes >> 24 : (uvec)((ivec)bytes >> 24);
        for (int m = 0; m < tiles[SUM].rows; ++m) {
            const auto a = (uint8_t)(tiles[A].at[m][k / 4] >> k % 4 * 8);
            tiles[SUM].at[m] += b * (uint32_t)(A_IS_UNSIGNED ? a : (int8_t)a);
        }
    }
}
#endif

}  // namespace
}  // namespace amx

// Returns why this process cannot use the library, or null.
extern "C" const char* foretoken_refusal() { return amx::refusal(); }
