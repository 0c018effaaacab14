// What a block does between its matrix products and its attention, on a CPU: one pass over each row.
//
// Everything is computed in float32, 16 lanes at a time, and rounded to bfloat16 where PyTorch rounds. Lanes are a
// constant, not the processor's, and belong to places in a row: a row's bits depend on nothing but the row.

#include <cmath>

#define LANES 16
#include "models/kernels/vectors.hpp"

namespace {

// Elements of a call from which a second thread saves more than it costs to wake.
constexpr int64_t WORTH_A_THREAD = 32768;
using Whole = std::integral_constant<int, W>;

// The first n lanes, the others 0.
template <typename Number, typename N>
inline vec load(const Number* p, N n) {
    Number numbers[W] = {};
    std::memcpy(numbers, p, n * sizeof *p);
    return load(numbers);
}

template <typename N>
inline void store(float* p, vec x, N n) { std::memcpy(p, &x, n * sizeof *p); }
template <typename N>
inline void store(bfloat16* p, vec x, N n) {
    const hvec bits = __builtin_convertvector((uvec)x >> 16, hvec);  // rounded before
    std::memcpy(p, &bits, n * sizeof *p);
}

// To the nearest value that T holds, ties to even. The lower half of a NaN that comes of bfloat16 is 0: it stays one.
template <typename T>
inline vec rounded(vec x) {
    if constexpr (std::is_same_v<T, float>) {
        return x;
    } else {
        const uvec bits = (uvec)x;
        return (vec)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
    }
}

// e^-x: a power of two, and a polynomial for what is left of -x, at most ln(2) / 2 (Taylor's, error below 1e-7).
// Exact only as a summand next to 1: it ends at e^-86. A NaN gives anything.
inline vec exp_of_minus(vec x) {
    const vec within = x > broadcast(86.0f) ? broadcast(86.0f) : x, magic = broadcast(12582912.0f);
    const vec shifted = magic - within * broadcast(1.44269504f);  // 1.5 * 2^23 rounds to whole numbers
    const vec whole = shifted - magic;
    const vec left = -within - whole * broadcast(0.693359375f) + whole * broadcast(2.12194440e-4f);  // ln(2) in two
    vec p = broadcast(1.0f / 5040);
    p = p * left + broadcast(1.0f / 720);
    p = p * left + broadcast(1.0f / 120);
    p = p * left + broadcast(1.0f / 24);
    p = p * left + broadcast(1.0f / 6);
    p = p * left + broadcast(0.5f);
    p = p * left + broadcast(1.0f);
    p = p * left + broadcast(1.0f);
    const vec power = (vec)((uvec)p + ((uvec)shifted << 23));
    return x < broadcast(-88.722839f) ? broadcast(INFINITY) : power;
}

template <typename Body>
inline void in_vectors(int64_t n, const Body& body) {
    int64_t i = 0;
    for (; i + W <= n; i += W) body(i, Whole{});
    if (i < n) body(i, (int)(n - i));
}

template <typename Body>
void in_rows(int64_t n_row, int64_t width, int n_thread, const Body& body) {
    if (n_thread == 1 || n_row * width < WORTH_A_THREAD) {
        for (int64_t row = 0; row < n_row; ++row) body(row);
        return;
    }
#pragma omp parallel for num_threads(n_thread) schedule(static)
    for (int64_t row = 0; row < n_row; ++row) body(row);
}

// RMSNorm of a row, of whose squares the lanes have the sums; `out` may be `x`.
template <typename T>
void normalise(const T* x, vec squares, const T* weight, float eps, int64_t dim, T* out) {
    const vec scale = broadcast(1 / std::sqrt(sum_of_lanes(squares) / dim + eps));
    in_vectors(dim, [&](int64_t i, auto n) {
        store(out + i, rounded<T>(load(x + i, n) * scale * load(weight + i, n)), n);
    });
}

template <typename T>
void add_norm(const T* x, const T* update, const T* weight, float eps, int64_t dim, T* sums, T* normed) {
    vec squares{};
    in_vectors(dim, [&](int64_t i, auto n) {
        const vec sum = rounded<T>(load(x + i, n) + load(update + i, n));
        store(sums + i, sum, n);
        squares += sum * sum;
    });
    normalise(sums, squares, weight, eps, dim, normed);
}

template <typename T>
void norm(const T* x, const T* weight, float eps, int64_t dim, T* out) {
    vec squares{};
    in_vectors(dim, [&](int64_t i, auto n) { squares += load(x + i, n) * load(x + i, n); });
    normalise(x, squares, weight, eps, dim, out);
}

// `out` may be `x`.
template <typename T>
void rotate(const T* x, const T* cos, const T* signed_sin, int64_t half, T* out) {
    in_vectors(half, [&](int64_t i, auto n) {
        const vec first = load(x + i, n), second = load(x + half + i, n);
        const vec kept_first = rounded<T>(first * load(cos + i, n));
        const vec kept_second = rounded<T>(second * load(cos + half + i, n));
        store(out + i, rounded<T>(kept_first + second * load(signed_sin + i, n)), n);
        store(out + half + i, rounded<T>(kept_second + first * load(signed_sin + half + i, n)), n);
    });
}

template <typename T>
void swiglu(const T* gate, const T* up, int64_t n_out, T* out) {
    in_vectors(n_out, [&](int64_t i, auto n) {
        const vec x = load(gate + i, n);
        const vec silu = rounded<T>(x / (broadcast(1.0f) + exp_of_minus(x)));
        store(out + i, rounded<T>(silu * load(up + i, n)), n);
    });
}

// Numbers that are not finite become 0.
template <typename T>
void copy_finite(const T* x, int64_t n, T* out) {
    in_vectors(n, [&](int64_t i, auto n) {
        const vec value = load(x + i, n);
        store(out + i, value - value == vec{} ? value : vec{}, n);
    });
}

// To 8 bits by the largest magnitude, as entries.quantize does; returns the scale.
template <typename T>
float to_int8(const T* x, int64_t size, int8_t* out) {
    vec largest{};
    in_vectors(size, [&](int64_t i, auto n) {
        const vec value = load(x + i, n);
        largest = larger(larger(value, -value), largest);
    });
    const float scale = std::max(largest_lane(largest) / 127, 1e-12f);
    in_vectors(size, [&](int64_t i, auto n) {
        int8_t codes[W];
        store_bytes(codes, nearest(load(x + i, n) / broadcast(scale)));
        std::memcpy(out + i, codes, n);
    });
    return scale;
}

// As in_rows, and calls with a null pointer to the elements' type too, which bytes per element tell: 4 float,
// 2 bfloat16.
template <typename Body>
void in_rows_of(int64_t bytes, int64_t n_row, int64_t width, int n_thread, const Body& body) {
    if (bytes == 4) in_rows(n_row, width, n_thread, [&](int64_t row) { body((float*)nullptr, row); });
    if (bytes == 2) in_rows(n_row, width, n_thread, [&](int64_t row) { body((bfloat16*)nullptr, row); });
}

}  // namespace

// Words of the calls. Strides are in elements. What is written is contiguous, as are the weight, the cosines and the
// sines.
struct AddNorm {
    int64_t bytes, n_row, dim, x_row, update_row;
    double eps;
    const void *x, *update, *weight;
    void *sums, *normed;
};

struct RotateHeads {
    int64_t bytes, n_token, n_head, head_dim, token, head, n_query;
    double eps;
    const void *heads, *cos, *signed_sin;
    const void* weight;  // null, or of the norm of the first n_query heads, then that of the others
    void* out;
};

struct Swiglu {
    int64_t bytes, n_row, n_out, in_row;
    const void* gate_and_up;
    void* out;
};

struct Pack {
    int64_t bytes, n_token, width, key_token, value_token;  // width: of all heads, which are contiguous
    const void *keys, *values;
    void* out;
};

// `made [n_row, n_token, 2, n_head, head_dim]` goes to slots of rows of entries: with scales as int8, without as it is, or
// if it narrows, from float to bfloat16. Strides: of both, row, head and slot.
struct Store {
    int64_t bytes, narrows, n_row, n_token, n_head, head_dim, strides[4], scale_strides[4];
    const void* made;
    const int64_t *rows, *slots;
    void* entries;
    float* scales;
};

// n_call calls of kernels, n_time times: the functions, and the words of all calls, one after another.
struct Repeat {
    int64_t n_time, n_call;
    int (*const *functions)(const int64_t* words, int n_thread);
    const int64_t *n_word, *words;
};

extern "C" {

int foretoken_add_norm(const AddNorm& c, int n_thread) {
    in_rows_of(c.bytes, c.n_row, c.dim, n_thread, [&](auto* element, int64_t row) {
        using T = std::remove_pointer_t<decltype(element)>;
        add_norm((const T*)c.x + row * c.x_row, (const T*)c.update + row * c.update_row, (const T*)c.weight,
                 (float)c.eps, c.dim, (T*)c.sums + row * c.dim, (T*)c.normed + row * c.dim);
    });
    return 0;
}

int foretoken_rotate_heads(const RotateHeads& c, int n_thread) {
    in_rows_of(c.bytes, c.n_token, c.n_head * c.head_dim, n_thread, [&](auto* element, int64_t t) {
        using T = std::remove_pointer_t<decltype(element)>;
        const T *cos = (const T*)c.cos + t * c.head_dim, *signed_sin = (const T*)c.signed_sin + t * c.head_dim;
        for (int64_t h = 0; h < c.n_head; ++h) {
            const T* from = (const T*)c.heads + t * c.token + h * c.head;
            T* to = (T*)c.out + (t * c.n_head + h) * c.head_dim;
            if (c.weight) {
                norm(from, (const T*)c.weight + (h < c.n_query ? 0 : c.head_dim), (float)c.eps, c.head_dim, to);
                from = to;
            }
            rotate(from, cos, signed_sin, c.head_dim / 2, to);
        }
    });
    return 0;
}

int foretoken_swiglu(const Swiglu& c, int n_thread) {
    in_rows_of(c.bytes, c.n_row, c.n_out, n_thread, [&](auto* element, int64_t row) {
        using T = std::remove_pointer_t<decltype(element)>;
        const T* gate = (const T*)c.gate_and_up + row * c.in_row;
        swiglu(gate, gate + c.n_out, c.n_out, (T*)c.out + row * c.n_out);
    });
    return 0;
}

int foretoken_pack(const Pack& c, int n_thread) {
    in_rows_of(c.bytes, c.n_token, 2 * c.width, n_thread, [&](auto* element, int64_t t) {
        using T = std::remove_pointer_t<decltype(element)>;
        T* to = (T*)c.out + 2 * t * c.width;
        copy_finite((const T*)c.keys + t * c.key_token, c.width, to);
        copy_finite((const T*)c.values + t * c.value_token, c.width, to + c.width);
    });
    return 0;
}

int foretoken_store(const Store& c, int n_thread) {
    in_rows_of(c.bytes, c.n_row * c.n_token, 2 * c.n_head * c.head_dim, n_thread, [&](auto* element, int64_t token) {
        using T = std::remove_pointer_t<decltype(element)>;
        const int64_t row = c.rows[token / c.n_token], slot = c.slots[token];
        for (int64_t i = 0; i < 2 * c.n_head; ++i) {
            const auto place = [&](const int64_t* by) {
                return i / c.n_head * by[0] + row * by[1] + i % c.n_head * by[2] + slot * by[3];
            };
            const T* from = (const T*)c.made + (token * 2 * c.n_head + i) * c.head_dim;
            if (c.scales)
                c.scales[place(c.scale_strides)] = to_int8(from, c.head_dim, (int8_t*)c.entries + place(c.strides));
            else if (c.narrows)
                in_vectors(c.head_dim, [&](int64_t d, auto n) {
                    store((bfloat16*)c.entries + place(c.strides) + d, rounded<bfloat16>(load(from + d, n)), n);
                });
            else
                std::memcpy((T*)c.entries + place(c.strides), from, c.head_dim * sizeof *from);
        }
    });
    return 0;
}

// Returns what the first call returned that was not 0.
int foretoken_repeat(const Repeat& repeat, int n_thread) {
    const int64_t* words = repeat.words;
    for (int64_t time = 0; time < repeat.n_time; ++time)
        for (int64_t i = 0; i < repeat.n_call; words += repeat.n_word[i++])
            if (const int failed = repeat.functions[i](words, n_thread)) return failed;
    return 0;
}

}  // extern "C"
