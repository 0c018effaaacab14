// Copies of chosen entries into a cache that keeps those that are chosen again.
#pragma once

#include <algorithm>
#include <vector>

#include "models/attention/vectors.hpp"

extern "C" {

// Assigns chosen slots to places. A slot that has a place keeps it, which is then EMPTY in `chosen`; new slots get places
// whose slot was not chosen again. source_slots: [all rows, heads, places].
struct Places {
    int64_t n_row, n_head, n_chosen, n_slot;
    int64_t* source_slots;
    const int64_t* rows;
    int64_t* chosen;
    const bool* is_new;
};

void foretoken_keep_chosen(const Places* call, int n_thread) {
    const Places& at = *call;
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

}  // extern "C"

namespace {

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

extern "C" void foretoken_copy_chosen(const Copy* call, int n_thread) {
    if (call->narrows) return copy_chosen<float, bfloat16>(*call, n_thread);
    if (call->item_size == 4) return copy_chosen<float, float>(*call, n_thread);
    return call->item_size == 2 ? copy_chosen<bfloat16, bfloat16>(*call, n_thread) : copy_chosen<int8_t, int8_t>(*call, n_thread);
}
