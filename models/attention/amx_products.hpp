// Products of entries with queries and with softmax weights in tiles of AMX, of 16 query rows each.
#pragma once

#include "models/attention/products.hpp"
#include "models/kernels/amx.hpp"

namespace {

// Tiles while a thread computes: sums in 0 to 3, factors in 4 and 5, and in 6 and 7 where a sum has only 8 words.
struct AmxTiles {
    AmxTiles() {
        amx::Shapes shapes;
        std::fill_n(shapes.rows, 8, 16);
        std::fill_n(shapes.bytes, 8, 64);
        shapes.bytes[6] = 8 * 4;
        shapes.rows[7] = 8;
        amx::configure(shapes);
    }
    AmxTiles(const AmxTiles&) = delete;
    ~AmxTiles() { amx::release(); }
};

template <typename Words>
struct AmxProducts : Words {
    static constexpr bool IN_AMX = true;
    using Words::PACK, Words::PLANES;

    // Multiplies words a [n_row, PLANES, N] with b [N, WIDTH], and calls `use(row, column, products)` with vectors of the
    // results. Sixteen rows are computed, also where fewer exist, so a row's bits do not depend on their number.
    template <int N, int WIDTH, bool A_IS_WEIGHTS, typename Use>
    static void multiply(const float* a, const float* b, int n_row, Ahead& ahead, const Use& use) {
        constexpr int COLUMNS = std::min(WIDTH / W, 4 / PLANES), DEPTH = std::min(N, 16), A = DEPTH == 16 ? 4 : 6, B = A + 1;
        alignas(64) float sums[PLANES * COLUMNS][16][W];
        ahead.begin(n_row, (n_row + 15) / 16 * PLANES * (WIDTH / W) * (N / DEPTH));
        for (int m = 0; m < n_row; m += 16)
            for (int column = 0; column < WIDTH; column += COLUMNS * W) {
                each<PLANES * COLUMNS>([](auto i) { amx::zero<i>(); });
                for (int k = 0; k < N; k += DEPTH)
                    each<PLANES * COLUMNS>([&](auto i) {
                        constexpr int plane = i / COLUMNS, of_plane = i % COLUMNS;
                        ahead.ask();
                        if (of_plane == 0) amx::load<A>(a + (m * PLANES + plane) * N + k, PLANES * N * sizeof(float));
                        amx::load<B>(b + k * WIDTH + column + of_plane * W, WIDTH * sizeof(float));
                        if constexpr (PACK == 2)
                            amx::multiply_bfloat16<i, A, B>();
                        else
                            amx::multiply_int8<i, A, B, A_IS_WEIGHTS>();
                    });
                each<PLANES * COLUMNS>([&](auto i) { amx::store<i>(sums[i], W * sizeof(float)); });
                for (int row = 0; row < std::min(16, n_row - m); ++row)
                    for (int i = 0; i < COLUMNS; ++i) {
                        vec x = load(sums[i][row]);
                        if constexpr (PLANES == 2) {
                            const ivec upper = (ivec)x << (A_IS_WEIGHTS ? Words::VALUE_SHIFT : Words::KEY_SHIFT);
                            x = __builtin_convertvector(upper + (ivec)load(sums[COLUMNS + i][row]), vec);
                        }
                        use(m + row, column + i * W, x);
                    }
            }
    }
};

typedef AmxProducts<Bfloat16Words> Bfloat16Products;
typedef AmxProducts<Int8Words> Int8Products;

}  // namespace
