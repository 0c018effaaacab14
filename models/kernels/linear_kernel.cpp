// y = x W^T + b on a CPU, for a few rows of x to a few hundred: weights stream through once, whatever their storage.
//
// Weights lie in blocks of 32 outputs, and in a block by steps along the inputs, so that a block is one stretch of
// memory: a step is two vectors, with a word of 32 bits for each output (two bfloat16, four int8, eight int4). A block
// meets all rows of x, in groups whose sums fill the registers. A sum runs over the inputs in the same order for any
// number of rows, and threads share blocks, not sums: a row's bits depend on nothing but the row.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)  // else the library has no function
#include <immintrin.h>
#if defined(AMX)
#include "models/kernels/amx.hpp"
#endif

namespace {

constexpr int OUTPUTS = 32, GROUP = 32;  // outputs of a block; inputs that share a scale, where weights have 4 bits
constexpr int64_t PANEL = 96;  // rows of x that meet all blocks before the next rows do: they stay in a core's L2

struct bfloat16 { uint16_t bits; };

inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load(const bfloat16* p) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
inline void store(float* p, __m512 x) { _mm512_storeu_ps(p, x); }
inline void store(bfloat16* p, __m512 x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }

inline __m512i word_at(const void* p) {
    int32_t word;
    std::memcpy(&word, p, sizeof word);
    return _mm512_set1_epi32(word);
}
// Products in assembly: GCC 12 moves registers about around the intrinsic of the first.
inline void add_products(__m512i& sum, __m512i weights, __m512i x) {  // of unsigned by signed bytes
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
}
inline void add_products(__m512& sum, __m512i weights, __m512i x) {  // of bfloat16
#if defined(WIDENED)
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
    sum = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(weights, 16), (__m512)_mm512_slli_epi32(x, 16), sum);
    sum = _mm512_fmadd_ps((__m512)_mm512_and_si512(weights, upper), (__m512)_mm512_and_si512(x, upper), sum);
#else
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
#endif
}

// A call: x [n_row, n_in] and y [n_row, n_out], scales [n_out] of int8 weights, bias [n_out] or null.
template <typename Number>
struct Call {
    int64_t n_row, n_in, n_out, x_row;
    const Number* x;
    const char* weights;
    const float *scales, *bias;
    Number* y;
};

// Rows of x in 8 bits, signed, with a scale and a sum for the whole row, or for each GROUP of its inputs.
struct Rounded {
    std::unique_ptr<int8_t[]> bytes;
    std::unique_ptr<float[]> scales;
    std::unique_ptr<uint32_t[]> sums;  // unsigned: they wrap around for rows that are not finite
};

// Rounds n numbers like models.kernels.quantize.round_to_uint8 and sums up the bytes. Returns the scale.
template <typename Number>
inline float round_to_int8(const Number* x, int64_t n, int8_t* to, uint32_t& sum) {
    __m512 top = _mm512_setzero_ps(), nothing = top;  // 0, or NaN after a number that is not finite
    for (int64_t i = 0; i < n; i += 16) {
        top = _mm512_max_ps(_mm512_abs_ps(load(x + i)), top);
        nothing = _mm512_fmadd_ps(load(x + i), _mm512_setzero_ps(), nothing);
    }
    const float scale = std::max(_mm512_reduce_max_ps(top) / 127, 1e-12f) + _mm512_reduce_add_ps(nothing);
    __m512i total = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 around_128 = _mm512_add_ps(_mm512_div_ps(load(x + i), _mm512_set1_ps(scale)), _mm512_set1_ps(128));
        const __m512i rounded = _mm512_sub_epi32(_mm512_cvtps_epi32(around_128), _mm512_set1_epi32(128));
        _mm_storeu_si128((__m128i*)(to + i), _mm512_cvtsepi32_epi8(rounded));
        total = _mm512_add_epi32(total, rounded);
    }
    sum = _mm512_reduce_add_epi32(total);
    return scale;
}

// Prefetches the next block into L2 while this block is multiplied: `lines` lines of memory at every step.
struct Prefetch {
    const char* at;
    int lines;
    void step(int n = 1) {
        for (int line = 0; line < n * lines; ++line, at += 64) _mm_prefetch(at, _MM_HINT_T1);
    }
};

// Adds products of R rows of x with a block of outputs: each word of x meets two vectors of weights.
template <int R, typename Sum, typename Value>
__attribute__((always_inline)) inline void add_steps(Sum (&sums)[R][2], const char* weights, const Value* x, int64_t x_row,
                                                     int64_t n_in, Prefetch prefetch) {
    for (int64_t i = 0; i < n_in; i += 4 / sizeof(Value), weights += 128) {
        prefetch.step();
        const __m512i w0 = _mm512_loadu_si512(weights), w1 = _mm512_loadu_si512(weights + 64);
        // Unrolled, here and below: an array that a variable indexes lies in memory, not in registers.
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const __m512i word = word_at(x + r * x_row + i);
            add_products(sums[r][0], w0, word);
            add_products(sums[r][1], w1, word);
        }
    }
}

template <int R, typename Number>
inline void put(const Call<Number>& call, int64_t row, int64_t output, const __m512 (&sums)[R][2]) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        const int64_t at = output + 16 * half;
        const __m512 bias = call.bias ? load(call.bias + at) : _mm512_setzero_ps();
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) store(call.y + (row + r) * call.n_out + at, _mm512_add_ps(sums[r][half], bias));
    }
}

struct Bfloat16Weights {
    static constexpr int ROWS = 12, LINES = 2;  // rows of a group at most; lines of memory of a step
    static constexpr bool ROUNDS = false, IN_TILES = false;
    static int64_t block_bytes(int64_t n_in) { return n_in * OUTPUTS * 2; }

    template <int R>
    static void multiply(const Call<bfloat16>& call, const Rounded&, int64_t row, int64_t output, Prefetch prefetch) {
        __m512 sums[R][2] = {};
        const char* weights = call.weights + output * call.n_in * 2;
        add_steps(sums, weights, call.x + row * call.x_row, call.x_row, call.n_in, prefetch);
        put(call, row, output, sums);
    }
    static const bfloat16* row_of(const Call<bfloat16>& call, const Rounded&, int64_t row) { return call.x + row * call.x_row; }
    static void finish(const Call<bfloat16>& call, const Rounded&, int64_t row, int64_t output, const __m512i (&sums)[1][2]) {
        put(call, row, output, {{(__m512)sums[0][0], (__m512)sums[0][1]}});
    }
};

// Weights as bytes around 128, with a scale for each output; x in 8 bits, with a scale for each row. Sums are exact.
struct Int8Weights {
    static constexpr int ROWS = 12, LINES = 2;
    static constexpr bool ROUNDS = true, IN_TILES = false;
    static int64_t block_bytes(int64_t n_in) { return n_in * OUTPUTS; }
    static int64_t scale_inputs(int64_t n_in) { return n_in; }

    template <int R, typename Number>
    static void multiply(const Call<Number>& call, const Rounded& x, int64_t row, int64_t output, Prefetch prefetch) {
        __m512i sums[R][2] = {};
        const char* weights = call.weights + output * call.n_in;
        add_steps(sums, weights, row_of(call, x, row), call.n_in, call.n_in, prefetch);
        finish(call, x, row, output, sums);
    }
    template <typename Number>
    static const int8_t* row_of(const Call<Number>& call, const Rounded& x, int64_t row) { return x.bytes.get() + row * call.n_in; }
    template <int R, typename Number>
    static void finish(const Call<Number>& call, const Rounded& x, int64_t row, int64_t output, const __m512i (&sums)[R][2]) {
        __m512 y[R][2];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const __m512i sum = _mm512_sub_epi32(sums[r][half], _mm512_set1_epi32(128u * x.sums[row + r]));
                const __m512 scale = _mm512_mul_ps(load(call.scales + output + 16 * half), _mm512_set1_ps(x.scales[row + r]));
                y[r][half] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
            }
        put(call, row, output, y);
    }
};

// Weights (code - 8) * scale + zero, both bfloat16 for each GROUP of inputs; x in 8 bits, a scale for each of its groups.
// A group of a block: 8 steps of a line, outputs 0 to 15 in the lower bits; scales; zeros, output 16 + i next to i.
struct Int4Weights {
    static constexpr int ROWS = 6, LINES = 1;
    static constexpr bool ROUNDS = true, IN_TILES = false;
    static constexpr int GROUP_BYTES = OUTPUTS * GROUP / 2 + 4 * OUTPUTS;
    static int64_t block_bytes(int64_t n_in) { return n_in / GROUP * GROUP_BYTES; }
    static int64_t scale_inputs(int64_t) { return GROUP; }

    static void widen(const char* pairs, __m512 (&to)[2]) {
        const __m512i bits = _mm512_loadu_si512(pairs);
        to[0] = (__m512)_mm512_slli_epi32(bits, 16);
        to[1] = (__m512)_mm512_and_si512(bits, _mm512_set1_epi32(0xffff0000));
    }
    template <int R, typename Number>
    static void multiply(const Call<Number>& call, const Rounded& x, int64_t row, int64_t output, Prefetch prefetch) {
        const int64_t n_group = call.n_in / GROUP;
        const char* weights = call.weights + output / OUTPUTS * block_bytes(call.n_in);
        const int8_t* bytes = x.bytes.get() + row * call.n_in;
        const __m512i lower = _mm512_set1_epi8(15);
        __m512 y[R][2] = {};
        for (int64_t g = 0; g < n_group; ++g, weights += GROUP_BYTES) {
            __m512i sums[R][2];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_set1_epi32(-8u * x.sums[(row + r) * n_group + g]);
#pragma GCC unroll 8
            for (int step = 0; step < 8; ++step) {
                prefetch.step();
                const __m512i codes = _mm512_loadu_si512(weights + step * 64);
                const __m512i w0 = _mm512_and_si512(codes, lower), w1 = _mm512_and_si512(_mm512_srli_epi16(codes, 4), lower);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const __m512i word = word_at(bytes + r * call.n_in + g * GROUP + 4 * step);
                    add_products(sums[r][0], w0, word);
                    add_products(sums[r][1], w1, word);
                }
            }
            prefetch.step();
            prefetch.step();
            __m512 scale[2], zero[2];
            widen(weights + 512, scale);
            widen(weights + 576, zero);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const int64_t at = (row + r) * n_group + g;
                const __m512 step = _mm512_set1_ps(x.scales[at]), sum = _mm512_set1_ps((int32_t)x.sums[at] * x.scales[at]);
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    const __m512 of_codes = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][half]), step);
                    y[r][half] = _mm512_fmadd_ps(of_codes, scale[half], _mm512_fmadd_ps(zero[half], sum, y[r][half]));
                }
            }
        }
        put(call, row, output, y);
    }
};

#if defined(AMX)
// Weights in tiles: sums in 0 to 3, 16 rows of x in 4 and 16 more in 5, weights of 16 outputs in 6 and of 16 more in 7.
template <typename Weights>
struct InTiles : Weights {
    static constexpr int ROWS = 32;
    static constexpr bool IN_TILES = true;

    static int height(int64_t n_row) { return (int)std::clamp<int64_t>(n_row, 1, 16); }  // rows of x in a tile
    static void configure(int64_t n_row) {
        amx::Shapes shapes;
        std::fill_n(shapes.bytes, 8, 64);
        std::fill_n(shapes.rows, 6, height(n_row));
        std::fill_n(shapes.rows + 6, 2, 16);
        amx::configure(shapes);
    }
    static void release() { amx::release(); }

    template <int SUM, int X, int W>
    static void add() {
        if constexpr (Weights::ROUNDS) amx::multiply_int8<SUM, X, W, false, true>();
        else amx::multiply_bfloat16<SUM, X, W>();
    }
    // The second tile of rows is left out for up to 16 rows. A tile that would reach beyond the last row begins earlier:
    // rows that are computed twice get the same bits.
    template <int R, typename Number>
    static void multiply(const Call<Number>& call, const Rounded& x, int64_t row, int64_t output, Prefetch prefetch) {
        constexpr int N_TILE = R > 16 ? 2 : 1, STRIDE = 4 * OUTPUTS;
        const int n = height(call.n_row);
        const int64_t first[2] = {std::min(row, call.n_row - n), std::min(row + 16, call.n_row - n)};
        const char* weights = call.weights + output / OUTPUTS * Weights::block_bytes(call.n_in);
        const auto *x0 = Weights::row_of(call, x, first[0]), *x1 = Weights::row_of(call, x, first[1]);
        const int64_t x_row = (Weights::row_of(call, x, 1) - Weights::row_of(call, x, 0)) * sizeof *x0;
        amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
        for (int64_t i = 0; i < call.n_in; i += 64 / sizeof *x0, weights += 16 * STRIDE) {
            amx::load<6>(weights, STRIDE);
            amx::load<4>(x0 + i, x_row);
            prefetch.step(4);
            add<0, 4, 6>();
            prefetch.step(4);
            amx::load<7>(weights + 64, STRIDE);
            if (N_TILE == 2) amx::load<5>(x1 + i, x_row);
            prefetch.step(4);
            add<1, 4, 7>();
            if (N_TILE == 2) add<2, 5, 6>(), add<3, 5, 7>();
            prefetch.step(4);
        }
        alignas(64) int32_t sums[2][16][OUTPUTS];
        amx::store<0>(sums[0], STRIDE), amx::store<1>(sums[0][0] + 16, STRIDE);
        if (N_TILE == 2) amx::store<2>(sums[1], STRIDE), amx::store<3>(sums[1][0] + 16, STRIDE);
        for (int tile = 0; tile < N_TILE; ++tile)
            for (int r = 0; r < n; ++r) {
                const __m512i halves[1][2] = {_mm512_load_si512(sums[tile][r]), _mm512_load_si512(sums[tile][r] + 16)};
                Weights::finish(call, x, first[tile] + r, output, halves);
            }
    }
};
#else
template <typename Weights>
using InTiles = Weights;
#endif

template <typename Weights, int R = Weights::ROWS, typename Number>
inline void multiply_rows(int n, const Call<Number>& call, const Rounded& x, int64_t row, int64_t output, Prefetch prefetch) {
    if constexpr (Weights::IN_TILES) {
        if (n > 16) return Weights::template multiply<32>(call, x, row, output, prefetch);
        return Weights::template multiply<16>(call, x, row, output, prefetch);
    }
    if (n == R) return Weights::template multiply<R>(call, x, row, output, prefetch);
    if constexpr (R > 1) multiply_rows<Weights, R - 1>(n, call, x, row, output, prefetch);
}

template <typename Weights, typename Number>
void multiply(const Call<Number>& call, int n_thread) {
    Rounded x;
    int64_t n_scale = 0;
    if constexpr (Weights::ROUNDS) {
        n_scale = call.n_in / Weights::scale_inputs(call.n_in);
        x = {std::unique_ptr<int8_t[]>(new int8_t[call.n_row * call.n_in]),
             std::unique_ptr<float[]>(new float[call.n_row * n_scale]),
             std::unique_ptr<uint32_t[]>(new uint32_t[call.n_row * n_scale])};
    }
    const int64_t block_bytes = Weights::block_bytes(call.n_in);
#pragma omp parallel num_threads(n_thread)
    {
        if constexpr (Weights::ROUNDS) {
            const int64_t n = call.n_in / n_scale;
#pragma omp for schedule(static)
            for (int64_t row = 0; row < call.n_row; ++row)
                for (int64_t s = 0; s < n_scale; ++s)
                    x.scales[row * n_scale + s] =
                        round_to_int8(call.x + row * call.x_row + s * n, n, x.bytes.get() + row * call.n_in + s * n,
                                      x.sums[row * n_scale + s]);
        }
        if constexpr (Weights::IN_TILES) Weights::configure(call.n_row);
        for (int64_t first = 0; first < call.n_row; first += PANEL) {
            // Groups of rows of nearly the same size, or of whole tiles.
            const int64_t last = std::min(first + PANEL, call.n_row), n_row = last - first;
            const int64_t n_group = (n_row + Weights::ROWS - 1) / Weights::ROWS;
            const int64_t per_group = Weights::IN_TILES ? Weights::ROWS : (n_row + n_group - 1) / n_group;
#pragma omp for schedule(static) nowait
            for (int64_t block = 0; block < call.n_out / OUTPUTS; ++block) {
                const char* next = call.weights + (block + 1) * block_bytes;
                for (int64_t row = first, group = 0; row < last; row += per_group, ++group) {
                    const int n = (int)std::min(per_group, last - row);
                    // The first group prefetches the whole next block, or the first two half of each step's lines.
                    const bool shares = Weights::LINES > 1 && n_group > 1;
                    const Prefetch prefetch{next + group * block_bytes / 2, shares ? group < 2 : group ? 0 : Weights::LINES};
                    multiply_rows<Weights>(n, call, x, row, block * OUTPUTS, prefetch);
                }
            }
        }
        if constexpr (Weights::IN_TILES) Weights::release();
    }
}

template <typename Number>
int multiply(int64_t storage, const Call<Number>& call, int n_thread) {
    // A tile has 64 inputs in int8. Rows of a group without tiles cost no more than memory; sums are exact either way.
    const bool in_tiles = call.n_in % 64 == 0 && call.n_row > Int8Weights::ROWS;
    if (storage == 8 && in_tiles) return multiply<InTiles<Int8Weights>>(call, n_thread), 0;
    if (storage == 8) return multiply<Int8Weights>(call, n_thread), 0;
    if (storage == 4) return multiply<Int4Weights>(call, n_thread), 0;
    if constexpr (sizeof(Number) == 2)
        if (storage == 16) return multiply<InTiles<Bfloat16Weights>>(call, n_thread), 0;
    return 1;
}

}  // namespace

#if defined(AMX)
// Returns why this process cannot use the library, or null.
extern "C" const char* foretoken_refusal() { return amx::refusal(); }
#endif

// storage: bits of a weight, 16, 8 or 4; sizes: n_row, n_in (a multiple of 32), n_out (a multiple of 32), elements from
// row to row of x. x and y are both bfloat16 or both float32, but bfloat16 for weights of 16 bits. Returns 0 on success.
extern "C" int foretoken_linear(int64_t storage, int64_t is_bfloat16, int64_t n_row, int64_t n_in, int64_t n_out,
                                int64_t x_row, const void* x, const void* weights, const float* scales,
                                const float* bias, void* y, int n_thread) {
    const auto call = [&](auto number) {
        using Number = decltype(number);
        return multiply<Number>(storage, {n_row, n_in, n_out, x_row, (const Number*)x, (const char*)weights, scales, bias,
                                          (Number*)y}, n_thread);
    };
    return is_bfloat16 ? call(bfloat16{}) : call(float{});
}
#endif
