// Products of tiles by Intel's AMX: six operations, or their arithmetic in plain C++ with -DEMULATED.
//
// A tile has up to 16 rows of up to 64 bytes. Written as assembly, because the intrinsics of g++ 12 take literals as tile
// numbers, and do not keep loads behind the stores before them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
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
    alignas(64) uint8_t at[16][64];
};
thread_local Tile tiles[8];

inline const char* refusal() { return nullptr; }

inline void configure(const Shapes& shapes) {
    for (int tile = 0; tile < 8; ++tile) {
        std::memset(&tiles[tile], 0, sizeof(Tile));
        tiles[tile].rows = shapes.rows[tile];
        tiles[tile].bytes = shapes.bytes[tile];
    }
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
        std::memcpy(tiles[TO].at[row], (const char*)from + row * stride, tiles[TO].bytes);
}
template <int FROM>
inline void store(void* to, int64_t stride) {
    for (int row = 0; row < tiles[FROM].rows; ++row)
        std::memcpy((char*)to + row * stride, tiles[FROM].at[row], tiles[FROM].bytes);
}

inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
// The first and second halves of each word of a row, which are in bfloat16.
struct Halves {
    float first[16], second[16];

    explicit Halves(const uint8_t* row) {
        uint32_t words[16], upper[16];
        std::memcpy(words, row, sizeof words);
        for (int n = 0; n < 16; ++n) upper[n] = words[n] & 0xffff0000, words[n] <<= 16;
        std::memcpy(first, words, sizeof words);
        std::memcpy(second, upper, sizeof upper);
        for (int n = 0; n < 16; ++n) first[n] = flushed(first[n]), second[n] = flushed(second[n]);
    }
};
// As the processor's manual has it: first and second halves are added up apart; numbers below the normal ones are 0.
template <int SUM, int A, int B>
inline void multiply_bfloat16() {
    float first[16][16] = {}, second[16][16] = {};
    for (int k = 0; k < tiles[B].rows; ++k) {
        const Halves b(tiles[B].at[k]);
        for (int m = 0; m < tiles[SUM].rows; ++m) {
            const Halves a(tiles[A].at[m]);
            for (int n = 0; n < 16; ++n) {
                first[m][n] = flushed(std::fma(a.first[k], b.first[n], first[m][n]));
                second[m][n] = flushed(std::fma(a.second[k], b.second[n], second[m][n]));
            }
        }
    }
    for (int m = 0; m < tiles[SUM].rows; ++m) {
        float sums[16];
        std::memcpy(sums, tiles[SUM].at[m], sizeof sums);
        for (int n = 0; n < 16; ++n) sums[n] = flushed(flushed(sums[n]) + flushed(first[m][n] + second[m][n]));
        std::memcpy(tiles[SUM].at[m], sums, sizeof sums);
    }
}
template <int SUM, int A, int B, bool A_IS_UNSIGNED, bool B_IS_UNSIGNED = false>
inline void multiply_int8() {
    uint32_t sums[16][16];
    std::memcpy(sums, tiles[SUM].at, sizeof sums);
    for (int k = 0; k < tiles[A].bytes; ++k) {
        int32_t b[16];
        for (int n = 0; n < 16; ++n) {
            const uint8_t byte = tiles[B].at[k / 4][4 * n + k % 4];
            b[n] = B_IS_UNSIGNED ? byte : (int8_t)byte;
        }
        for (int m = 0; m < tiles[SUM].rows; ++m) {
            const int32_t a = A_IS_UNSIGNED ? tiles[A].at[m][k] : (int8_t)tiles[A].at[m][k];
            for (int n = 0; n < 16; ++n) sums[m][n] += a * b[n];
        }
    }
    std::memcpy(tiles[SUM].at, sums, sizeof sums);
}
#endif

}  // namespace
}  // namespace amx

// Returns why this process cannot use the library, or null.
extern "C" const char* foretoken_refusal() { return amx::refusal(); }
