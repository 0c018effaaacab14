// Attention of a few query tokens over a long KV cache on a CPU: one pass over keys and values, softmax on the way.
//
// A task is one KV head of one row and a part of its slots. Its M query rows (the tokens and the heads that share
// the KV head) go together, so every entry is read once, whatever M is. Slots are taken in tiles: a tile of keys is
// transposed in registers, so that scores of neighbouring slots share a vector. The arithmetic of a query row does
// not depend on the other rows of its block, nor on how many there are: verifying T tokens gives the very bits of
// decoding them one by one.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, ROWS = 6;  // lanes of a vector; query rows per pass, whose accumulators fill the registers
#elif defined(__AVX__)
constexpr int W = 8, ROWS = 3;
#else
constexpr int W = 4, ROWS = 3;
#endif
constexpr int TILE = 2 * W;  // slots per tile
constexpr int NOTED = 8;  // slots next to each other whose attention is noted as one
constexpr int64_t EMPTY = -1;  // a slot that is none
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t hvec __attribute__((vector_size(2 * W)));
typedef int8_t bvec __attribute__((vector_size(W)));
typedef uint8_t ubvec __attribute__((vector_size(W)));
typedef float unaligned_vec __attribute__((vector_size(4 * W), aligned(4)));

struct bfloat16 {
    uint16_t bits;
    bfloat16() = default;
    explicit bfloat16(float x) {  // to the nearest, ties to even; x is finite
        uint32_t all;
        std::memcpy(&all, &x, sizeof all);
        bits = (all + 0x7fff + (all >> 16 & 1)) >> 16;
    }
};
struct float8 { uint8_t bits; };  // e4m3fn

inline vec broadcast(float x) { return x - vec{}; }
inline vec load(const float* p) { return *reinterpret_cast<const unaligned_vec*>(p); }
inline void store(float* p, vec x) { *reinterpret_cast<unaligned_vec*>(p) = x; }
inline vec load(const bfloat16* p) {
    hvec bits;
    std::memcpy(&bits, p, sizeof bits);
    return (vec)(__builtin_convertvector(bits, uvec) << 16);
}
inline vec load(const int8_t* p) {
    bvec bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, ivec), vec);
}
// Exponent and mantissa move to where float32 has them, subnormals too; 2^120 mends the bias (127 for 7).
inline vec load(const float8* p) {
    ubvec bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    const uvec bits = __builtin_convertvector(bytes, uvec);
    return (vec)((bits & 0x80) << 24 | (bits & 0x7f) << 20) * broadcast(0x1p120f);
}
inline vec larger(vec a, vec b) { return a > b ? a : b; }

// A vector's lanes, folded in halves: S lanes are left to fold.
template <int S = W / 2, typename Fold>
inline float across(vec x, const Fold& fold) {
    ivec other;
    for (int lane = 0; lane < W; ++lane) other[lane] = lane ^ S;
    x = fold(x, __builtin_shuffle(x, other));
    if constexpr (S > 1) return across<S / 2>(x, fold);
    return x[0];
}
inline float largest_lane(vec x) { return across(x, [](vec a, vec b) { return larger(a, b); }); }
inline float sum_of_lanes(vec x) { return across(x, [](vec a, vec b) { return a + b; }); }

// 2^x for x <= 0: exact powers for the whole part, a polynomial on [-1/2, 1/2] for the rest (error below 2e-7).
inline vec exp2_of(vec x) {
    x = larger(x, broadcast(-127.0f));
    const vec shifted = x + broadcast(12582912.0f);  // 1.5 * 2^23: rounds to whole numbers
    const vec f = x - (shifted - broadcast(12582912.0f));
    vec p = broadcast(1.5403530393381609e-4f);
    p = p * f + broadcast(1.3333558146428443e-3f);
    p = p * f + broadcast(9.618129107628477e-3f);
    p = p * f + broadcast(5.550410866482158e-2f);
    p = p * f + broadcast(2.402265069591007e-1f);
    p = p * f + broadcast(6.931471805599453e-1f);
    p = p * f + broadcast(1.0f);
    const ivec whole = (ivec)shifted << 23;
    const vec result = (vec)((ivec)p + whole);
    return x > broadcast(-126.0f) ? result : vec{};
}

// In-place transpose of W vectors: at each of log2(W) steps, halves of pairs are exchanged.
template <int S>
inline void exchange(vec* r) {
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

struct Layout {
    int64_t batch, n_kv_head, n_slot, n_row;  // n_row: query rows of a KV head
    int64_t key_row, key_head, key_slot, value_row, value_head, value_slot;  // strides in elements
    int64_t scale_row, scale_head, scale_slot;
    int64_t part;  // slots per task, whole tiles
    int64_t group, noted_row, noted_token, noted_head;  // query heads of a KV head, and strides of what is noted
    // Tokens in 4 bits, how many share a key's grid, and grids of a value; strides of what Packed names.
    int64_t n_packed, packed_group, n_value_grid, key_code_row, key_code_head, value_code_row, value_code_head;
    int64_t key_grid_both, key_grid_row, key_grid_head, value_grid_both, value_grid_row, value_grid_head, value_grid_part;
};

// A tile of n keys, its head dimension first: keys_t [D, TILE].
template <int D, typename Entry>
inline void transpose_keys(const Entry* keys, int64_t stride, int n, float* keys_t) {
    for (int block = 0; block < TILE; block += W)
        for (int d = 0; d < D; d += W) {
            vec r[W];
            for (int s = 0; s < W; ++s) {
                const Entry* key = keys + (block + s) * stride + d;
                r[s] = block + s < n ? load(key) : vec{};
                // Ask for the next tile now, into L2: asking at its turn leaves the arithmetic waiting for memory.
                __builtin_prefetch(key + TILE * stride, 0, 2);
            }
            exchange<W / 2>(r);
            for (int i = 0; i < W; ++i) store(keys_t + (d + i) * TILE + block, r[i]);
        }
}

// Scores of N query rows against one tile, as multiples of log2(e).
template <int N, int D>
inline void tile_scores(const float* q, const float* keys_t, float* scores) {
    for (int half = 0; half < TILE; half += 2 * W) {
        vec acc[N][2] = {};
        for (int d = 0; d < D; ++d) {
            const vec k0 = load(keys_t + d * TILE + half), k1 = load(keys_t + d * TILE + half + W);
#pragma GCC unroll 8
            for (int m = 0; m < N; ++m) {
                const vec x = broadcast(q[m * D + d]);
                acc[m][0] += x * k0;
                acc[m][1] += x * k1;
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < N; ++m) {
            store(scores + m * TILE + half, acc[m][0]);
            store(scores + m * TILE + half + W, acc[m][1]);
        }
    }
}

// out += weights * values, for N query rows and 4 vectors of the head dimension at a time.
template <int N, int D, typename Entry>
inline void tile_values(const float* weights, const Entry* values, int64_t stride, int n, float* out) {
    constexpr int V = D / W < 4 ? D / W : 4;
    for (int at = 0; at < D; at += V * W) {
        vec acc[N][V];
#pragma GCC unroll 8
        for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) acc[m][v] = load(out + m * D + at + v * W);
        for (int s = 0; s < n; ++s) {
            vec x[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                x[v] = load(values + s * stride + at + v * W);
                __builtin_prefetch(values + (s + TILE) * stride + at + v * W, 0, 2);
            }
#pragma GCC unroll 8
            for (int m = 0; m < N; ++m) {
                const vec w = broadcast(weights[m * TILE + s]);
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) acc[m][v] += w * x[v];
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) store(out + m * D + at + v * W, acc[m][v]);
    }
}

// Calls `pass(row, size)` over all rows, in passes of ROWS and then of fewer.
template <int N = ROWS, typename Pass>
inline void in_passes(int64_t row, int64_t n_row, const Pass& pass) {
    for (; row + N <= n_row; row += N) pass(row, std::integral_constant<int, N>{});
    if constexpr (N > 1) in_passes<N - 1>(row, n_row, pass);
}

// The entries of one row and head as they are stored.
template <int D, typename Entry>
struct Stored {
    const Entry *keys, *values;
    int64_t key_stride, value_stride;

    // Of all query rows against the n slots of a tile, weights [n_row, TILE].
    void scores(const float* q, int64_t n_row, int64_t start, int n, float* weights) const {
        alignas(64) float keys_t[D * TILE];
        transpose_keys<D>(keys + start * key_stride, key_stride, n, keys_t);
        in_passes(0, n_row, [&](int64_t m, auto size) {
            tile_scores<size, D>(q + m * D, keys_t, weights + m * TILE);
        });
    }
    void add(const float* weights, int64_t n_row, int64_t start, int n, float* out) const {
        in_passes(0, n_row, [&](int64_t m, auto size) {
            tile_values<size, D>(weights + m * TILE, values + start * value_stride, value_stride, n, out + m * D);
        });
    }
};

// Entries in 4 bits, code * step + low: a byte has one of each half of the head dimension, the first in the lower bits.
// The grids, which are low and step, move into the queries of keys and into the weights of values, so that what is done
// for every number is to unpack its code. Of a group of keys, slots are next to each other: [D / 2, group].
template <int D>
struct In4Bits {
    static constexpr int HALF = D / 2;
    const uint8_t *key_codes, *value_codes;
    const bfloat16 *key_low, *key_step, *value_low, *value_step;
    int64_t group, n_value_grid, value_grid_part;

    static void unpack(const uint8_t* codes, vec& low, vec& high) {
        ubvec bytes;
        std::memcpy(&bytes, codes, sizeof bytes);
        const ubvec first = bytes & 15, second = bytes >> 4;
        low = __builtin_convertvector(__builtin_convertvector(first, ivec), vec);
        high = __builtin_convertvector(__builtin_convertvector(second, ivec), vec);
    }

    template <int N>
    void block_scores(const float* q, int64_t slot, float* weights) const {
        const int64_t in = slot / group;
        alignas(64) float scaled[N * D];
        vec acc[N][2];
#pragma GCC unroll 8
        for (int m = 0; m < N; ++m) {
            vec lowest{};
            for (int d = 0; d < D; d += W) {
                const vec x = load(q + m * D + d);
                lowest += x * load(key_low + in * D + d);
                store(scaled + m * D + d, x * load(key_step + in * D + d));
            }
            acc[m][0] = broadcast(sum_of_lanes(lowest));
            acc[m][1] = vec{};
        }
        const uint8_t* codes = key_codes + in * HALF * group + slot % group;
        for (int d = 0; d < HALF; ++d, codes += group) {
            __builtin_prefetch(codes + TILE * HALF, 0, 2);
            vec low, high;
            unpack(codes, low, high);
#pragma GCC unroll 8
            for (int m = 0; m < N; ++m) {
                acc[m][0] += broadcast(scaled[m * D + d]) * low;
                acc[m][1] += broadcast(scaled[m * D + HALF + d]) * high;
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < N; ++m) store(weights + m * TILE, acc[m][0] + acc[m][1]);
    }

    void scores(const float* q, int64_t n_row, int64_t start, int n, float* weights) const {
        for (int block = 0; block < n; block += W)
            in_passes(0, n_row, [&](int64_t m, auto size) {
                block_scores<size>(q + m * D, start + block, weights + m * TILE + block);
            });
    }

    template <int N>
    void add_rows(const float* weights, int64_t start, int n, float* out) const {
        for (int at = 0; at < HALF; at += 2 * W) {
            // Two vectors of the head dimension's first half, then those of the second that share their bytes.
            const int dims[4] = {at, at + W, HALF + at, HALF + at + W};
            alignas(64) float scaled[4][N][TILE];
            vec acc[N][4];
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) {
                const int64_t grid = dims[v] * n_value_grid / D * value_grid_part + start;
#pragma GCC unroll 8
                for (int m = 0; m < N; ++m) {
                    vec lowest{};
                    for (int s = 0; s < n; s += W) {
                        const vec w = load(weights + m * TILE + s);
                        lowest += w * load(value_low + grid + s);
                        store(scaled[v][m] + s, w * load(value_step + grid + s));
                    }
                    acc[m][v] = load(out + m * D + dims[v]) + broadcast(sum_of_lanes(lowest));
                }
            }
            for (int s = 0; s < n; ++s) {
                const uint8_t* codes = value_codes + (start + s) * HALF + at;
                __builtin_prefetch(codes + TILE * HALF, 0, 2);
                vec x[4];
                unpack(codes, x[0], x[2]);
                unpack(codes + W, x[1], x[3]);
#pragma GCC unroll 8
                for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
                    for (int v = 0; v < 4; ++v) acc[m][v] += broadcast(scaled[v][m][s]) * x[v];
            }
#pragma GCC unroll 8
            for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
                for (int v = 0; v < 4; ++v) store(out + m * D + dims[v], acc[m][v]);
        }
    }

    void add(const float* weights, int64_t n_row, int64_t start, int n, float* out) const {
        in_passes(0, n_row, [&](int64_t m, auto size) {
            add_rows<size>(weights + m * TILE, start, n, out + m * D);
        });
    }
};

// The largest of each NOTED of a tile's scores: to [TILE / NOTED].
inline void keep_largest(const float* scores, float* to) {
    static_assert(NOTED == 8);  // as in kv_cache/entries.py
    ivec next, second, fourth, first_of_each;  // of shuffles, which take lanes modulo W
    for (int lane = 0; lane < W; ++lane) {
        next[lane] = lane ^ 1;
        second[lane] = lane ^ 2;
        fourth[lane] = lane ^ 4;
        first_of_each[lane] = NOTED * lane % TILE;
    }
    vec half[2];
    for (int i = 0; i < 2; ++i) {
        vec x = load(scores + i * W);
        x = larger(x, __builtin_shuffle(x, next));
        x = larger(x, __builtin_shuffle(x, second));
        half[i] = larger(x, __builtin_shuffle(x, fourth));
    }
    if (W < NOTED) half[0] = larger(half[0], half[1]);
    const vec largest = __builtin_shuffle(half[0], half[1], first_of_each);
    std::memcpy(to, &largest, TILE / NOTED * sizeof(float));
}

// One part of one KV head: out [n_row, D] unnormalised, then per query row its largest score, then its mass. kept: where
// the largest of each NOTED scores go, [n_row, n_kept], if not null.
template <int D, typename Entries>
void attend_part(const Layout& at, const float* q, const Entries& entries, const float* key_scales,
                 const float* value_scales, const int64_t* slots, const int64_t* queries, const int64_t* oldest,
                 int64_t first, int64_t last, float* kept, int64_t n_kept, float* out) {
    const int64_t n_row = at.n_row;
    float *largest = out + n_row * D, *mass = largest + n_row;
    std::vector<float> scores(n_row * TILE);
    float* weights = scores.data();
    std::memset(out, 0, n_row * D * sizeof(float));
    // What some query sees lies in [from_any, to_any], what all of them see in [from_all, to_all].
    int64_t from_any = oldest[0], from_all = oldest[0], to_any = queries[0], to_all = queries[0];
    for (int64_t m = 0; m < n_row; ++m) {
        largest[m] = MINUS_INFINITY;
        mass[m] = 0;
        from_any = std::min(from_any, oldest[m]), from_all = std::max(from_all, oldest[m]);
        to_any = std::max(to_any, queries[m]), to_all = std::min(to_all, queries[m]);
    }
    for (int64_t start = first; start < last; start += TILE) {
        const int n = (int)(last - start < TILE ? last - start : TILE);
        int in_any = 0, in_all = 0;
        for (int s = 0; s < n; ++s) {
            const int64_t position = slots[start - first + s];
            in_any += position >= from_any && position <= to_any;
            in_all += position >= from_all && position <= to_all;
        }
        if (in_any == 0) {
            for (int64_t m = 0; kept && m < n_row; ++m)
                std::fill_n(kept + m * n_kept + start / NOTED, TILE / NOTED, MINUS_INFINITY);
            continue;
        }
        entries.scores(q, n_row, start, n, weights);
        if (key_scales)
            for (int64_t m = 0; m < n_row; ++m)
                for (int s = 0; s < n; ++s) weights[m * TILE + s] *= key_scales[(start + s) * at.scale_slot];
        for (int64_t m = 0; m < n_row; ++m) {
            float* w = weights + m * TILE;
            if (in_all < TILE) {
                for (int s = 0; s < n; ++s)
                    if (slots[start - first + s] < oldest[m] || slots[start - first + s] > queries[m])
                        w[s] = MINUS_INFINITY;
                for (int s = n; s < TILE; ++s) w[s] = MINUS_INFINITY;
            }
            if (kept) keep_largest(w, kept + m * n_kept + start / NOTED);
            vec top = load(w);
            for (int s = W; s < TILE; s += W) top = larger(top, load(w + s));
            const float highest = std::max(largest[m], largest_lane(top));
            if (highest == MINUS_INFINITY) {
                std::memset(w, 0, TILE * sizeof(float));
                continue;
            }
            if (highest > largest[m]) {
                const float shrink = std::exp2(largest[m] - highest);
                mass[m] *= shrink;
                for (int d = 0; d < D; d += W) store(out + m * D + d, load(out + m * D + d) * broadcast(shrink));
                largest[m] = highest;
            }
            vec sum{};
            for (int s = 0; s < TILE; s += W) {
                const vec p = exp2_of(load(w + s) - broadcast(highest));
                sum += p;
                store(w + s, p);
            }
            mass[m] += sum_of_lanes(sum);
        }
        if (value_scales)
            for (int64_t m = 0; m < n_row; ++m)
                for (int s = 0; s < n; ++s) weights[m * TILE + s] *= value_scales[(start + s) * at.scale_slot];
        entries.add(weights, n_row, start, n, out);
    }
}

// What the best of each NOTED slots gets of the attention of a token, averaged over its G heads: to [n], by their scores
// [G, n_kept] and the score that would get all of each [G].
inline void note_shares(const float* scores, int64_t n_kept, int64_t group, const float* whole, int64_t n, float* to) {
    for (int64_t start = 0; start < n; start += W) {
        vec share{};
        for (int64_t g = 0; g < group; ++g)
            share += exp2_of(load(scores + g * n_kept + start) - broadcast(whole[g]));
        std::memcpy(to + start, &share, std::min<int64_t>(W, n - start) * sizeof(float));
    }
}

// What is in 4 bits beside entries of other storage, null if nothing is, and the positions of its slots.
struct Packed {
    const uint8_t *key_codes, *value_codes;
    const bfloat16 *key_grids, *value_grids;
    const int64_t* slots;
};

// A token counts once: from its place in the ring [n_ring] or, EMPTY in `to`, not from there.
inline void without_recent(const int64_t* slots, const int64_t* ring, int64_t n_ring, int64_t first, int64_t last,
                           int64_t* to) {
    for (int64_t slot = first, in_ring = first % n_ring; slot < last; ++slot) {
        to[slot - first] = ring[in_ring] == slot ? EMPTY : slots[slot];
        in_ring = in_ring + 1 == n_ring ? 0 : in_ring + 1;
    }
}

template <int D, typename Entry>
void attend(const Layout& at, const float* q, const int64_t* rows, const void* keys, const void* values,
            const float* key_scales, const float* value_scales, const int64_t* slots, const int64_t* queries,
            const int64_t* oldest, const Packed& packed, float* workspace, float* out, float* noted, int n_thread) {
    const int64_t n_own = (at.n_slot + at.part - 1) / at.part, n_part = n_own + (at.n_packed + at.part - 1) / at.part;
    const int64_t n_head = at.batch * at.n_kv_head, n_task = n_head * n_part;
    const int64_t per_task = at.n_row * (D + 2), n_noted = (at.n_slot + NOTED - 1) / NOTED;
    const int64_t n_kept = (n_noted + W - 1) / W * W;
    const std::unique_ptr<float[]> scores(noted ? new float[n_head * at.n_row * n_kept] : nullptr);
#pragma omp parallel num_threads(n_thread)
    {
        std::vector<int64_t> older(at.part);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < n_task; ++task) {
            const int64_t head = task / n_part, part = task % n_part;
            const int64_t row = head / at.n_kv_head, kv_head = head % at.n_kv_head, stored = rows ? rows[row] : row;
            const auto attend_to = [&](const auto& own, const float* with_keys, const float* with_values,
                                       const int64_t* seen, int64_t first, int64_t last) {
                attend_part<D>(at, q + head * at.n_row * D, own, with_keys, with_values, seen, queries + row * at.n_row,
                               oldest + row * at.n_row, first, last,
                               noted ? scores.get() + head * at.n_row * n_kept : nullptr, n_kept,
                               workspace + task * per_task);
            };
            if (part < n_own) {
                const int64_t scale_at = stored * at.scale_row + kv_head * at.scale_head, first = part * at.part;
                const Stored<D, Entry> own{(const Entry*)keys + stored * at.key_row + kv_head * at.key_head,
                                           (const Entry*)values + stored * at.value_row + kv_head * at.value_head,
                                           at.key_slot, at.value_slot};
                attend_to(own, key_scales ? key_scales + scale_at : nullptr,
                          value_scales ? value_scales + scale_at : nullptr, slots + row * at.n_slot + first, first,
                          std::min(first + at.part, at.n_slot));
                continue;
            }
            const int64_t first = (part - n_own) * at.part, last = std::min(first + at.part, at.n_packed);
            without_recent(packed.slots + row * at.n_packed, slots + row * at.n_slot, at.n_slot, first, last, older.data());
            const bfloat16* of_keys = packed.key_grids + stored * at.key_grid_row + kv_head * at.key_grid_head;
            const bfloat16* of_values = packed.value_grids + stored * at.value_grid_row + kv_head * at.value_grid_head;
            const In4Bits<D> own{packed.key_codes + stored * at.key_code_row + kv_head * at.key_code_head,
                                 packed.value_codes + stored * at.value_code_row + kv_head * at.value_code_head,
                                 of_keys, of_keys + at.key_grid_both, of_values, of_values + at.value_grid_both,
                                 at.packed_group, at.n_value_grid, at.value_grid_part};
            attend_to(own, nullptr, nullptr, older.data(), first, last);
        }
    }
#pragma omp parallel for num_threads(n_thread) collapse(2) if (n_head * at.n_row >= 4096)
    for (int64_t head = 0; head < n_head; ++head)
        for (int64_t m = 0; m < at.n_row; ++m) {
            const float* partials = workspace + head * n_part * per_task;
            float highest = MINUS_INFINITY, total = 0;
            for (int64_t p = 0; p < n_part; ++p) {
                const float x = partials[p * per_task + at.n_row * D + m];
                highest = x > highest ? x : highest;
            }
            float* o = out + (head * at.n_row + m) * D;
            std::memset(o, 0, D * sizeof(float));
            for (int64_t p = 0; p < n_part; ++p) {
                const float* partial = partials + p * per_task;
                const float weight = std::exp2(partial[at.n_row * D + m] - highest);
                if (!(weight > 0)) continue;
                total += weight * partial[at.n_row * (D + 1) + m];
                for (int d = 0; d < D; ++d) o[d] += weight * partial[m * D + d];
            }
            for (int d = 0; d < D; ++d) o[d] /= total;
            workspace[head * n_part * per_task + at.n_row * D + m] = highest + std::log2(total * at.group);
        }
    if (!noted) return;
#pragma omp parallel for num_threads(n_thread) schedule(static)
    for (int64_t task = 0; task < n_head * at.n_row / at.group; ++task) {
        const int64_t m = task * at.group % at.n_row, head = task * at.group / at.n_row;
        const int64_t row = head / at.n_kv_head, stored = rows ? rows[row] : row, token = m / at.group;
        note_shares(scores.get() + (head * at.n_row + m) * n_kept, n_kept, at.group,
                    workspace + head * n_part * per_task + at.n_row * D + m, n_noted,
                    noted + stored * at.noted_row + token * at.noted_token + head % at.n_kv_head * at.noted_head);
    }
}

// Calls `run` with the head dimension and a value of the type of entries: 0 float, 1 bfloat16, 2 int8, 3 float8. Returns
// 0, or 1 if there is no such kernel.
template <typename Run>
int with_types(int64_t head_dim, int64_t entries, const Run& run) {
    const auto with = [&](auto entry) {
        if (head_dim == 64) return run(std::integral_constant<int, 64>{}, entry), 0;
        if (head_dim == 128) return run(std::integral_constant<int, 128>{}, entry), 0;
        return 1;
    };
    if (entries == 0) return with(float{});
    if (entries == 1) return with(bfloat16{});
    if (entries == 2) return with(int8_t{});
    return entries == 3 ? with(float8{}) : 1;
}

// The entries [n_chosen] before `end` in chunks of best share [n_chunk]: those of the first n_first whatever they have,
// then chunk by chunk, of equals the first. Of a text with fewer entries 0 in place of others.
inline void best_chunks(const float* share, int64_t n_chunk, int64_t chunk, int64_t end, int64_t n_first,
                        int64_t n_chosen, std::vector<uint32_t>& ranks, std::vector<int64_t>& best, int64_t* chosen) {
    n_chunk = std::min(n_chunk, (std::max<int64_t>(end, 0) + chunk - 1) / chunk);
    // As whole numbers, floats that are not negative rank alike.
    std::memcpy(ranks.data(), share, n_chunk * sizeof(float));
    std::fill_n(ranks.begin(), std::min(n_first / chunk, n_chunk), UINT32_MAX);
    // The upper 22 bits of the lowest rank of so many, 11 at a time, and how many with them are among these.
    uint32_t lowest = 0, known = 0;
    int64_t n_left = std::min(n_chunk, (n_chosen + chunk - 1) / chunk + 1);
    for (const int shift : {21, 10}) {
        int32_t count[0x800] = {};
        for (int64_t i = 0; i < n_chunk; ++i)
            if ((ranks[i] & known) == lowest) ++count[ranks[i] >> shift & 0x7ff];
        uint32_t at = 0x7ff;
        for (; at > 0 && count[at] < n_left; --at) n_left -= count[at];
        lowest |= at << shift, known |= 0x7ffu << shift;
    }
    best.clear();
    for (int64_t i = 0; i < n_chunk; ++i)
        if (ranks[i] >= lowest) best.push_back(i);
    std::stable_sort(best.begin(), best.end(), [&](int64_t a, int64_t b) { return ranks[a] > ranks[b]; });
    int64_t n = 0;
    for (const int64_t i : best)
        for (int64_t slot = i * chunk; slot < std::min(end, (i + 1) * chunk) && n < n_chosen; ++slot) chosen[n++] = slot;
    std::fill(chosen + n, chosen + n_chosen, 0);
}

// Gives each slot that was chosen its place: where it was, if it is held already, which is then EMPTY in chosen, or one
// whose slot was not chosen again. sizes: rows, heads, slots chosen, slots; held: [all rows, heads, slots chosen].
void keep_chosen(const int64_t* sizes, int64_t* held, const int64_t* rows, int64_t* chosen, const bool* is_new,
                 int n_thread) {
    const int64_t n_head = sizes[1], n = sizes[2];
#pragma omp parallel num_threads(n_thread)
    {
        std::vector<char> is_missing(sizes[3]), stays(n);
        std::vector<int64_t> missing(n);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < sizes[0] * n_head; ++task) {
            if (!is_new[task / n_head]) continue;
            int64_t *own = held + (rows[task / n_head] * n_head + task % n_head) * n, *slots = chosen + task * n, count = 0;
            for (int64_t i = 0; i < n; ++i) is_missing[slots[i]] = 1;
            for (int64_t i = 0; i < n; ++i) {
                stays[i] = own[i] != EMPTY && is_missing[own[i]];
                if (stays[i]) is_missing[own[i]] = 0;
            }
            for (int64_t i = 0; i < n; ++i)
                if (is_missing[slots[i]]) {
                    is_missing[slots[i]] = 0;
                    missing[count++] = slots[i];
                }
            for (int64_t i = 0; i < n; ++i) slots[i] = stays[i] ? EMPTY : own[i] = missing[--count];
        }
    }
}

// Copies vectors of `size` elements at the chosen slots of each row and head to the first slots there, of rows that are
// new, but where a slot is EMPTY. Strides are those of keys and values, rows and heads, and slots.
template <typename From, typename To>
void copy_chosen(const int64_t* sizes, const From* from, To* to, const int64_t* from_rows, const int64_t* to_rows,
                 const int64_t* chosen, const bool* is_new, int n_thread) {
    const int64_t batch = sizes[0], n_head = sizes[1], n = sizes[2], size = sizes[3], *step = sizes + 4, *put = sizes + 8;
#pragma omp parallel for num_threads(n_thread) schedule(dynamic, 1)
    for (int64_t task = 0; task < 2 * batch * n_head; ++task) {
        const int64_t both = task / (batch * n_head), row = task / n_head % batch, head = task % n_head;
        if (!is_new[row]) continue;
        const From* source = from + both * step[0] + from_rows[row] * step[1] + head * step[2];
        To* target = to + both * put[0] + to_rows[row] * put[1] + head * put[2];
        const int64_t* slots = chosen + (row * n_head + head) * n;
        for (int64_t i = 0; i < n; ++i, target += put[3]) {
            if (slots[i] == EMPTY) continue;
            const From* ahead = source + std::max<int64_t>(slots[std::min(i + 8, n - 1)], 0) * step[3];
            for (int64_t d = 0; d < size; d += 64 / sizeof(From)) __builtin_prefetch(ahead + d);
            const From* vector = source + slots[i] * step[3];
            for (int64_t d = 0; d < size; ++d) target[d] = To(vector[d]);
        }
    }
}

}  // namespace

// 8-bit entries have scales. rows: that of the entries which each row of queries attends to, or null if these are the
// same. noted: as of `KV.noted`; null if nothing is.
// key_codes to packed_slots: as of Packed, where slots are those of a ring of recent tokens; null elsewhere.
extern "C" int foretoken_attend(const int64_t* layout, int64_t head_dim, int64_t entries, const float* q,
                                const int64_t* rows, const void* keys, const void* values, const float* key_scales,
                                const float* value_scales, const int64_t* slots, const int64_t* queries,
                                const int64_t* oldest, const uint8_t* key_codes, const uint8_t* value_codes,
                                const void* key_grids, const void* value_grids, const int64_t* packed_slots,
                                float* workspace, float* out, float* noted, int n_thread) {
    Layout at;
    std::memcpy(&at, layout, sizeof at);
    const Packed packed{key_codes, value_codes, (const bfloat16*)key_grids, (const bfloat16*)value_grids, packed_slots};
    return with_types(head_dim, entries, [&](auto size, auto entry) {
        attend<size, decltype(entry)>(at, q, rows, keys, values, key_scales, value_scales, slots, queries, oldest,
                                      packed, workspace, out, noted, n_thread);
    });
}

// sizes: rows, heads, chunks, strides of the share's rows and heads, entries of a chunk, entries chosen, of these the
// first. share [rows, heads, chunks]; ends: of the entries of each row.
extern "C" int foretoken_best_chunks(const int64_t* sizes, const float* share, const int64_t* ends, int64_t* chosen,
                                     int n_thread) {
#pragma omp parallel num_threads(n_thread)
    {
        std::vector<uint32_t> ranks(sizes[2]);
        std::vector<int64_t> best;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < sizes[0] * sizes[1]; ++task) {
            const int64_t row = task / sizes[1], head = task % sizes[1];
            best_chunks(share + row * sizes[3] + head * sizes[4], sizes[2], sizes[5], ends[row], sizes[7], sizes[6], ranks,
                        best, chosen + task * sizes[6]);
        }
    }
    return 0;
}

extern "C" int foretoken_keep_chosen(const int64_t* sizes, int64_t* held, const int64_t* rows, int64_t* chosen,
                                     const bool* is_new, int n_thread) {
    keep_chosen(sizes, held, rows, chosen, is_new, n_thread);
    return 0;
}

// sizes: rows, heads, slots, elements, then strides of what is read and of what is written. narrows: from float to
// bfloat16; else elements of item_size bytes are copied.
extern "C" int foretoken_copy_chosen(const int64_t* sizes, int64_t item_size, int64_t narrows, const void* from, void* to,
                                     const int64_t* from_rows, const int64_t* to_rows, const int64_t* chosen,
                                     const bool* is_new, int n_thread) {
    const auto copy = [&](auto read, auto written) {
        copy_chosen(sizes, (const decltype(read)*)from, (decltype(written)*)to, from_rows, to_rows, chosen, is_new, n_thread);
        return 0;
    };
    if (narrows) return copy(float{}, bfloat16{});
    if (item_size == 4) return copy(float{}, float{});
    return item_size == 2 ? copy(bfloat16{}, bfloat16{}) : copy(int8_t{}, int8_t{});
}
