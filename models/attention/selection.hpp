// Choice of entries by the attention that they get, and their copies into a cache of chosen entries.
#pragma once

#include <algorithm>
#include <vector>

#include "models/kernels/vectors.hpp"

namespace {

// Writes to [n_chosen] the entries before `end` in the chunks of largest share [n_chunk]: always the first n_first
// entries, then chunk by chunk, of equal chunks the first. If the text has fewer entries, the rest is 0.
inline void best_chunks(const float* share, int64_t n_chunk, int64_t chunk, int64_t end, int64_t n_first,
                        int64_t n_chosen, std::vector<uint32_t>& ranks, std::vector<int64_t>& best, int64_t* chosen) {
    n_chunk = std::min(n_chunk, (std::max<int64_t>(end, 0) + chunk - 1) / chunk);
    // Floats that are not negative have the order of their bits.
    std::memcpy(ranks.data(), share, n_chunk * sizeof(float));
    std::fill_n(ranks.begin(), std::min(n_first / chunk, n_chunk), UINT32_MAX);
    // The upper 22 bits of the lowest rank among the n_left highest, found 11 bits at a time.
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

// Vectors of `size` elements of item_size bytes; narrows: float becomes bfloat16. Strides are those of keys and values,
// rows, heads and slots, of the source and of the target.
struct Copy {
    int64_t item_size, narrows, n_row, n_head, n_chosen, size, from_stride[4], to_stride[4];
    const void* from;
    void* to;
    const int64_t *from_rows, *to_rows, *chosen;
    const bool* is_new;
};

// Copies vectors from the chosen slots of each row and head to the first slots of the target, in rows that are new,
// except where a slot is EMPTY.
template <typename From, typename To>
void copy_chosen(const Copy& at, int n_thread) {
#pragma omp parallel for num_threads(n_thread) schedule(dynamic, 1)
    for (int64_t task = 0; task < 2 * at.n_row * at.n_head; ++task) {
        const int64_t both = task / (at.n_row * at.n_head), row = task / at.n_head % at.n_row, head = task % at.n_head;
        if (!at.is_new[row]) continue;
        const int64_t *step = at.from_stride, *put = at.to_stride, *slots = at.chosen + (row * at.n_head + head) * at.n_chosen;
        const From* source = (const From*)at.from + both * step[0] + at.from_rows[row] * step[1] + head * step[2];
        To* target = (To*)at.to + both * put[0] + at.to_rows[row] * put[1] + head * put[2];
        for (int64_t i = 0; i < at.n_chosen; ++i, target += put[3]) {
            if (slots[i] == EMPTY) continue;
            const From* ahead = source + std::max<int64_t>(slots[std::min(i + 8, at.n_chosen - 1)], 0) * step[3];
            for (int64_t d = 0; d < at.size; d += 64 / sizeof(From)) __builtin_prefetch(ahead + d);
            const From* vector = source + slots[i] * step[3];
            for (int64_t d = 0; d < at.size; ++d) target[d] = To(vector[d]);
        }
    }
}

}  // namespace

extern "C" {

// ends: the end of each row's entries. `best_chunks` of each row and head: share [rows, heads, chunks].
struct Choice {
    int64_t n_row, n_head, n_chunk, share_row, share_head, chunk, n_chosen, n_first;
    const float* share;
    const int64_t* ends;
    int64_t* chosen;
};

int foretoken_best_chunks(const Choice& at, int n_thread) {
#pragma omp parallel num_threads(n_thread)
    {
        std::vector<uint32_t> ranks(at.n_chunk);
        std::vector<int64_t> best;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < at.n_row * at.n_head; ++task) {
            const int64_t row = task / at.n_head, head = task % at.n_head;
            best_chunks(at.share + row * at.share_row + head * at.share_head, at.n_chunk, at.chunk, at.ends[row], at.n_first,
                        at.n_chosen, ranks, best, at.chosen + task * at.n_chosen);
        }
    }
    return 0;
}

// Assigns chosen slots to places. A slot that has a place keeps it, which is then EMPTY in `chosen`; new slots get places
// whose slot was not chosen again. source_slots: [all rows, heads, places].
struct Places {
    int64_t n_row, n_head, n_chosen, n_slot;
    int64_t* source_slots;
    const int64_t* rows;
    int64_t* chosen;
    const bool* is_new;
};

int foretoken_keep_chosen(const Places& at, int n_thread) {
    const int64_t n = at.n_chosen;
#pragma omp parallel num_threads(n_thread)
    {
        std::vector<char> is_missing(at.n_slot), stays(n);
        std::vector<int64_t> missing(n);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < at.n_row * at.n_head; ++task) {
            const int64_t row = task / at.n_head;
            if (!at.is_new[row]) continue;
            int64_t *sources = at.source_slots + (at.rows[row] * at.n_head + task % at.n_head) * n;
            int64_t *slots = at.chosen + task * n, count = 0;
            for (int64_t i = 0; i < n; ++i) is_missing[slots[i]] = 1;
            for (int64_t i = 0; i < n; ++i) {
                stays[i] = sources[i] != EMPTY && is_missing[sources[i]];
                if (stays[i]) is_missing[sources[i]] = 0;
            }
            for (int64_t i = 0; i < n; ++i)
                if (is_missing[slots[i]]) {
                    is_missing[slots[i]] = 0;
                    missing[count++] = slots[i];
                }
            for (int64_t i = 0; i < n; ++i) slots[i] = stays[i] ? EMPTY : sources[i] = missing[--count];
        }
    }
    return 0;
}

int foretoken_copy_chosen(const Copy& at, int n_thread) {
    if (at.narrows) return copy_chosen<float, bfloat16>(at, n_thread), 0;
    if (at.item_size == 4) return copy_chosen<float, float>(at, n_thread), 0;
    if (at.item_size == 2) return copy_chosen<bfloat16, bfloat16>(at, n_thread), 0;
    return copy_chosen<int8_t, int8_t>(at, n_thread), 0;
}

}  // extern "C"
