// y = x W^T + b on a CPU, for a few rows of x to a few hundred: weights stream through once, whatever their storage.
//
// Weights lie in blocks of 32 outputs, and in a block by steps along the inputs, so that a block is one stretch of
// memory: a step is two vectors, with a word of 32 bits for each output (two bfloat16, four int8, eight int4). A block
// meets all rows of x, in groups whose sums fill the registers; a vector of AVX2 has half of a block's vector, and
// multiplies bfloat16 in float32, half of a block at a time. For x in float32, weights in float32 or bfloat16 lie in
// blocks of 16 outputs, in the order of inputs. A sum runs over the inputs in the same order for any number of rows, and
// threads share blocks, not sums: a row's bits depend on nothing but the row.

#if defined(__AVX2__) && defined(__FMA__)  // else the library has no function
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define LANES 16
#else
#define LANES 8
#define WIDENED
#endif

#include <memory>

#include "models/kernels/vectors.hpp"
#if defined(AMX)
#include "models/kernels/amx.hpp"
#endif

namespace {

constexpr int OUTPUTS = 32, GROUP = 32;  // outputs of a block; inputs that share a scale, where weights have 4 bits
constexpr int64_t PANEL = 96;  // rows of x that meet all blocks before the next rows do: they stay in a core's L2

inline uvec load_words(const char* p) { return (uvec)load((const float*)p); }
inline uvec lower_codes(uvec x) { return x & 0x0f0f0f0f; }
inline uvec upper_codes(uvec x) { return lower_codes(x >> 4); }

// Weights in 8 bits are bytes around 128. CENTRE is what their products count as 0: AVX2 multiplies bytes around 0.
// ROWS: the most rows of x in a group, by the bits of a weight.
#if LANES == 16
constexpr int ROWS_16_AND_8 = 12, ROWS_4 = 6;
constexpr uint32_t CENTRE = 128;

inline void store(bfloat16* p, vec x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }

// Products in assembly: GCC 12 moves registers about around the intrinsic of the first.
inline void add_products(uvec& sum, uvec weights, uvec x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
}
inline void add_code_products(uvec& sum, uvec codes, uvec x) { add_products(sum, codes, x); }
inline uvec sums_of_codes(uvec sum) { return sum; }
#if !defined(WIDENED)
inline void add_products(vec& sum, uvec weights, uvec x) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
}
#endif

#else
constexpr int ROWS_16_AND_8 = 4, ROWS_4 = 4;
constexpr uint32_t CENTRE = 0;

inline void store(bfloat16* p, vec x) {  // to the nearest, ties to even; a NaN stays one
    const uvec bits = (uvec)x, up = bits + 0x7fff + (bits >> 16 & 1), kept = x == x ? up : bits | 0x400000;
    const hvec upper = __builtin_convertvector(kept >> 16, hvec);
    std::memcpy(p, &upper, sizeof upper);
}

// 16 bits hold the sums of a group's codes, 16 products of 15 and 127, and those of two products of 127 and 127.
inline void add_code_products(uvec& sum, uvec codes, uvec x) {
    sum = (uvec)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)codes, (__m256i)x));
}
inline uvec sums_of_codes(uvec sum) { return (uvec)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
inline void add_products(uvec& sum, uvec weights, uvec x) {
    const __m256i around_0 = (__m256i)(weights ^ 0x80808080);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(around_0), _mm256_sign_epi8((__m256i)x, around_0));
    sum += sums_of_codes((uvec)pairs);
}
#endif

// A block's outputs are multiplied in pieces of two vectors: of 16 lanes, or of 8, from outputs W * piece on and from
// 16 + W * piece on.
constexpr int PIECES = 16 / W;

// Words of a call: x [n_row, n_in] and y [n_row, n_out], scales [n_out] of int8 weights, bias [n_out] or null. storage:
// bits of a weight, 16, 8 or 4, and for x in float32 also 32. n_in, n_out: multiples of 32. x_row: elements from row to
// row of x. Number: float or bfloat16.
template <typename Number>
struct Call {
    int64_t storage, is_bfloat16, n_row, n_in, n_out, x_row;
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
    vec top{}, nothing{};  // `nothing` becomes NaN after a number that is not finite
    for (int64_t i = 0; i < n; i += W) {
        const vec number = load(x + i);
        top = larger(larger(number, -number), top);
        nothing += number * broadcast(0);
    }
    const float scale = std::max(largest_lane(top) / 127, 1e-12f) + sum_of_lanes(nothing);
    uvec total{};
    for (int64_t i = 0; i < n; i += W) {
        const uvec rounded = (uvec)nearest(load(x + i) / broadcast(scale) + broadcast(128)) - 128;
        store_bytes(to + i, (ivec)rounded);
        total += rounded;
    }
    sum = sum_of_lanes(total);
    return scale;
}

// Prefetches the next block into L2 while this block is multiplied. bytes: how many at every step.
struct Prefetch {
    const char* at;
    int bytes;
    const char* until = at;
    void step(int n = 1) {
        for (until += n * bytes; at < until; at += 64) _mm_prefetch(at, _MM_HINT_T1);
    }
};

// Calls f with a number of rows from 1 to R as a constant.
template <int R, typename F>
inline void with_rows(int n, const F& f) {
    if (n == R) return f(std::integral_constant<int, R>{});
    if constexpr (R > 1) with_rows<R - 1>(n, f);
}

// Adds products of R rows of x with a piece of a block: each word of x meets two vectors of weights.
template <int R, typename Sum, typename Value>
__attribute__((always_inline)) inline void add_steps(Sum (&sums)[R][2], const char* weights, const Value* x, int64_t x_row,
                                                     int64_t n_in, Prefetch prefetch) {
    constexpr int STEP = 4 / sizeof(Value);  // inputs of a word of weights
    for (int64_t i = 0; i < n_in; i += STEP, weights += 128) {
        prefetch.step();
        const uvec w0 = load_words(weights), w1 = load_words(weights + 64);
        // Unrolled, here and below: an array that a variable indexes lies in memory, not in registers.
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const auto word = word_at(x + r * x_row + i);
            add_products(sums[r][0], w0, word);
            add_products(sums[r][1], w1, word);
        }
    }
}

// apart: the outputs from the first vector of sums to the second.
template <int R, typename Number>
inline void put(const Call<Number>& call, int64_t row, int64_t output, const vec (&sums)[R][2], int apart = 16) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        const int64_t at = output + apart * half;
        const vec bias = call.bias ? load(call.bias + at) : broadcast(0.0f);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) store(call.y + (row + r) * call.n_out + at, sums[r][half] + bias);
    }
}

#if !defined(WIDENED)
struct Bfloat16Weights {
    static constexpr int ROWS = ROWS_16_AND_8, LINES = 2;  // rows of a group at most; lines of memory of a step
    static constexpr bool ROUNDS = false, IN_TILES = false;
    static int64_t block_bytes(int64_t n_in) { return n_in * OUTPUTS * 2; }

    template <int R>
    static void multiply(const Call<bfloat16>& call, const Rounded&, int64_t row, int64_t block, int piece, Prefetch prefetch) {
        vec sums[R][2] = {};
        const char* weights = call.weights + block * block_bytes(call.n_in) + 4 * W * piece;
        add_steps(sums, weights, call.x + row * call.x_row, call.x_row, call.n_in, prefetch);
        put(call, row, block * OUTPUTS + W * piece, sums);
    }
    static const bfloat16* row_of(const Call<bfloat16>& call, const Rounded&, int64_t row) { return call.x + row * call.x_row; }
    static void finish(const Call<bfloat16>& call, const Rounded&, int64_t row, int64_t output, const uvec (&sums)[1][2]) {
        put(call, row, output, {{(vec)sums[0][0], (vec)sums[0][1]}});
    }
};
#endif

// Weights as bytes around 128, with a scale for each output; x in 8 bits, with a scale for each row. Sums are exact.
struct Int8Weights {
    static constexpr int ROWS = ROWS_16_AND_8, LINES = 2;
    static constexpr bool ROUNDS = true, IN_TILES = false;
    static int64_t block_bytes(int64_t n_in) { return n_in * OUTPUTS; }
    static int64_t scale_inputs(int64_t n_in) { return n_in; }

    template <int R, typename Number>
    static void multiply(const Call<Number>& call, const Rounded& x, int64_t row, int64_t block, int piece, Prefetch prefetch) {
        uvec sums[R][2] = {};
        const char* weights = call.weights + block * block_bytes(call.n_in) + 4 * W * piece;
        add_steps(sums, weights, row_of(call, x, row), call.n_in, call.n_in, prefetch);
        finish(call, x, row, block * OUTPUTS + W * piece, sums);
    }
    template <typename Number>
    static const int8_t* row_of(const Call<Number>& call, const Rounded& x, int64_t row) { return x.bytes.get() + row * call.n_in; }
    template <int R, typename Number>
    static void finish(const Call<Number>& call, const Rounded& x, int64_t row, int64_t output, const uvec (&sums)[R][2]) {
        vec y[R][2];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const uvec sum = sums[r][half] - CENTRE * x.sums[row + r];
                const vec scale = load(call.scales + output + 16 * half) * broadcast(x.scales[row + r]);
                y[r][half] = __builtin_convertvector((ivec)sum, vec) * scale;
            }
        put(call, row, output, y);
    }
};

// Weights (code - 8) * scale + zero, both bfloat16 for each GROUP of inputs; x in 8 bits, a scale for each of its groups.
// A group of a block: 8 steps of a line, outputs 0 to 15 in the lower bits; scales; zeros, output 16 + i next to i.
struct Int4Weights {
    static constexpr int ROWS = ROWS_4, LINES = 1;
    static constexpr bool ROUNDS = true, IN_TILES = false;
    static constexpr int GROUP_BYTES = OUTPUTS * GROUP / 2 + 4 * OUTPUTS;
    static int64_t block_bytes(int64_t n_in) { return n_in / GROUP * GROUP_BYTES; }
    static int64_t scale_inputs(int64_t) { return GROUP; }

    template <int R, typename Number>
    static void multiply(const Call<Number>& call, const Rounded& x, int64_t row, int64_t block, int piece, Prefetch prefetch) {
        const int64_t n_group = call.n_in / GROUP;
        const char* weights = call.weights + block * block_bytes(call.n_in) + 4 * W * piece;
        const int8_t* bytes = x.bytes.get() + row * call.n_in;
        vec y[R][2] = {};
        for (int64_t g = 0; g < n_group; ++g, weights += GROUP_BYTES) {
            uvec sums[R][2] = {};
#pragma GCC unroll 8
            for (int step = 0; step < 8; ++step) {
                prefetch.step();
                const uvec codes = load_words(weights + step * 64), w0 = lower_codes(codes), w1 = upper_codes(codes);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const uvec word = word_at(bytes + r * call.n_in + g * GROUP + 4 * step);
                    add_code_products(sums[r][0], w0, word);
                    add_code_products(sums[r][1], w1, word);
                }
            }
            prefetch.step();
            prefetch.step();
            const uvec scales = load_words(weights + 512), zeros = load_words(weights + 576);
            const vec scale[2] = {lower_bfloat16(scales), upper_bfloat16(scales)};
            const vec zero[2] = {lower_bfloat16(zeros), upper_bfloat16(zeros)};
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const int64_t at = (row + r) * n_group + g;
                const vec step = broadcast(x.scales[at]), sum = broadcast((int32_t)x.sums[at] * x.scales[at]);
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    const uvec of_codes = sums_of_codes(sums[r][half]) - 8 * x.sums[at];
                    y[r][half] += zero[half] * sum;
                    y[r][half] += __builtin_convertvector((ivec)of_codes, vec) * step * scale[half];
                }
            }
        }
        put(call, row, block * OUTPUTS + W * piece, y);
    }
};

#if defined(AMX)
// Weights in tiles: sums in 0 to 3, 16 rows of x in 4 and 16 more in 5, weights of 16 outputs in 6 and of 16 more in 7.
template <typename Weights>
struct InTiles : Weights {
    static_assert(W == 16, "finish takes whole vectors of 16 outputs");
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
    static void multiply(const Call<Number>& call, const Rounded& x, int64_t row, int64_t block, int, Prefetch prefetch) {
        constexpr int N_TILE = R > 16 ? 2 : 1, STRIDE = 4 * OUTPUTS;
        const int n = height(call.n_row);
        const int64_t first[2] = {std::min(row, call.n_row - n), std::min(row + 16, call.n_row - n)};
        const char* weights = call.weights + block * Weights::block_bytes(call.n_in);
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
                const uvec halves[1][2] = {(uvec)load((const float*)sums[tile][r]), (uvec)load((const float*)sums[tile][r] + 16)};
                Weights::finish(call, x, first[tile] + r, block * OUTPUTS, halves);
            }
    }
};
#else
template <typename Weights>
using InTiles = Weights;
#endif

template <typename Weights, typename Number>
inline void multiply_rows(int n, const Call<Number>& call, const Rounded& x, int64_t row, int64_t block, Prefetch prefetch) {
    if constexpr (Weights::IN_TILES) {
        if (n > 16) return Weights::template multiply<32>(call, x, row, block, 0, prefetch);
        return Weights::template multiply<16>(call, x, row, block, 0, prefetch);
    }
    with_rows<Weights::ROWS>(n, [&](auto size) {
        Weights::template multiply<size>(call, x, row, block, 0, prefetch);
        prefetch.bytes = 0;
        for (int piece = 1; piece < PIECES; ++piece) Weights::template multiply<size>(call, x, row, block, piece, prefetch);
    });
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
                    const int n_line = shares ? group < 2 : group ? 0 : Weights::LINES;
                    const Prefetch prefetch{next + group * block_bytes / 2, 64 * n_line};
                    multiply_rows<Weights>(n, call, x, row, block, prefetch);
                }
            }
        }
        if constexpr (Weights::IN_TILES) Weights::release();
    }
}

constexpr int FLOAT_OUTPUTS = 16;  // outputs of a block, for x in float32

// Multiplies R rows of x, which are x_row numbers apart, by two vectors of outputs: their words are vector_bytes apart,
// and step_bytes from one word of an output to its next. A word has N inputs: one float32, or two bfloat16.
template <int R, int N, typename Number>
inline void multiply_block(const Call<Number>& call, const float* x, int64_t x_row, int64_t row, int64_t output,
                           const char* weights, int64_t vector_bytes, int64_t step_bytes, Prefetch prefetch) {
    vec sums[R][2] = {};
    for (int64_t i = 0; i < call.n_in; i += N, weights += step_bytes) {
        prefetch.step();
        const uvec words[2] = {load_words(weights), load_words(weights + vector_bytes)};
#pragma GCC unroll 2
        for (int of_word = 0; of_word < N; ++of_word) {
            vec w[2];
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v)
                w[v] = N == 1 ? (vec)words[v] : of_word ? upper_bfloat16(words[v]) : lower_bfloat16(words[v]);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const vec number = broadcast(x[r * x_row + i + of_word]);
                sums[r][0] += w[0] * number;
                sums[r][1] += w[1] * number;
            }
        }
    }
    put(call, row, output, sums, W);
}

// Multiplies x, as float32, by weights in words of N inputs, [n_out / BLOCK, n_in / N, BLOCK], where BLOCK is 16 for x in
// float32 and 32 for x in bfloat16.
template <int N, typename Number>
void multiply_floats(const Call<Number>& call, int n_thread) {
    constexpr bool IS_FLOAT = sizeof(Number) == 4;
    constexpr int BLOCK = IS_FLOAT ? FLOAT_OUTPUTS : OUTPUTS;
    constexpr int PAIR = 2 * W, ROWS = W == 16 ? 12 : N == 1 ? 6 : 4;  // outputs, and rows, whose sums fill the registers
    constexpr int BLOCKS = std::max(1, PAIR / BLOCK), PARTS = BLOCK * BLOCKS / PAIR;  // of a block
    const int64_t block_bytes = call.n_in * BLOCK * 4 / N, vector_bytes = BLOCKS == 1 ? 4 * W : block_bytes;
#pragma omp parallel num_threads(n_thread)
    {
        const std::unique_ptr<float[]> widened(IS_FLOAT ? nullptr : new float[std::min(PANEL, call.n_row) * call.n_in]);
        for (int64_t first = 0; first < call.n_row; first += PANEL) {
            const int64_t last = std::min(first + PANEL, call.n_row), n_group = (last - first + ROWS - 1) / ROWS;
            const int64_t per_group = (last - first + n_group - 1) / n_group, group_bytes = BLOCKS * block_bytes / PARTS / n_group;
            const int prefetch_bytes = (4 * PAIR + n_group - 1) / n_group;  // each group prefetches a part
            const float* x = widened.get();
            int64_t x_row = call.n_in;
            if constexpr (IS_FLOAT)
                x = call.x + first * call.x_row, x_row = call.x_row;
            else
                for (int64_t row = first; row < last; ++row)
                    for (int64_t i = 0; i < call.n_in; i += W)
                        store(widened.get() + (row - first) * x_row + i, load(call.x + row * call.x_row + i));
#pragma omp for schedule(static) nowait
            for (int64_t output = 0; output < call.n_out; output += PAIR) {
                const int64_t part = output % BLOCK / PAIR;
                const char* weights = call.weights + output / BLOCK * block_bytes;
                const char* next = weights + BLOCKS * block_bytes + part * block_bytes / PARTS;
                weights += part * 4 * PAIR;
                for (int64_t row = first; row < last; row += per_group, next += group_bytes)
                    with_rows<ROWS>(std::min(per_group, last - row), [&](auto size) {
                        multiply_block<size, N>(call, x + (row - first) * x_row, x_row, row, output, weights,
                                                   vector_bytes, 4 * BLOCK, {next, prefetch_bytes});
                    });
            }
        }
    }
}

template <typename Number>
int multiply(const Call<Number>& call, int n_thread) {
    // A tile has 64 inputs in int8. Rows of a group without tiles cost no more than memory; sums are exact either way.
    const bool in_tiles = call.n_in % 64 == 0 && call.n_row > Int8Weights::ROWS;
    if (call.storage == 8 && in_tiles) return multiply<InTiles<Int8Weights>>(call, n_thread), 0;
    if (call.storage == 8) return multiply<Int8Weights>(call, n_thread), 0;
    if (call.storage == 4) return multiply<Int4Weights>(call, n_thread), 0;
    if constexpr (sizeof(Number) == 2) {
#if defined(WIDENED)
        if (call.storage == 16) return multiply_floats<2>(call, n_thread), 0;
#else
        if (call.storage == 16) return multiply<InTiles<Bfloat16Weights>>(call, n_thread), 0;
#endif
    } else {
        if (call.storage == 16) return multiply_floats<2>(call, n_thread), 0;
        if (call.storage == 32) return multiply_floats<1>(call, n_thread), 0;
    }
    return 1;
}

}  // namespace

// Returns 0 on success.
extern "C" int foretoken_linear(const void* words, int n_thread) {
    const auto* call = (const Call<float>*)words;
    return call->is_bfloat16 ? multiply(*(const Call<bfloat16>*)words, n_thread) : multiply(*call, n_thread);
}
#endif
