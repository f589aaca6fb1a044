// Products of rows with matrices that lie input by input. A row's result does not depend on the rows beside it: every
// element is one sum, taken in the order of the inputs.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "threads.h"
#include "vectors.h"

// Sums of so many rows and of two vectors of columns fit into the registers, beside what they are made of.
constexpr int MOST_ROWS = REGISTERS == 32 ? 12 : 6;
constexpr int MOST_COLUMNS = 128, AHEAD = 16, CACHE_LINE = 64, WORTH_PACKING = 3, FEW_SETS = 1024;

struct Matrix {
    const void* weight;  // [inputs, columns] of `kind`, its rows `stride` apart
    const float* bias;   // [columns], or null
    int64_t columns, stride, kind;
};

// sums[row][vector] = x[row] * w, for ROWS rows and VECTORS * LANES columns; the last vector has `last` columns. What is
// multiplied next, at `next`, is fetched meanwhile: where these columns were read before, `again`, all of it.
template <class T, int ROWS, int VECTORS, bool WHOLE>
__attribute__((noinline)) static void multiply(const float* x, int64_t x_stride, const T* w, int64_t w_stride,
                                               int64_t inputs, int64_t last, const T* next, bool again, vec* sums) {
    vec kept[ROWS][VECTORS] = {};
    auto pass = [&](int64_t begin, int64_t end, int64_t ahead) __attribute__((always_inline)) {
        for (int64_t k = begin; k < end; k++) {
            const T* from = w + k * w_stride;
            vec columns[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                if (v * LANES % (CACHE_LINE / (int64_t)sizeof(T)) == 0) __builtin_prefetch(from + ahead + v * LANES, 0, 3);
                columns[v] = WHOLE ? load(from + v * LANES) : load_some(from + v * LANES, last);
            }
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) {
                vec scale = all(x[row * x_stride + k]);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) kept[row][v] = fused(scale, columns[v], kept[row][v]);
            }
        }
    };
    int64_t alone = again || inputs < AHEAD ? 0 : inputs - AHEAD;
    pass(0, alone, AHEAD * w_stride);
    pass(alone, inputs, next - w - (again ? 0 : alone * w_stride));
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[row * VECTORS + v] = kept[row][v];
}

template <class T>
using Multiply = void (*)(const float*, int64_t, const T*, int64_t, int64_t, int64_t, const T*, bool, vec*);

// By vectors, as wide as registers allow for so many rows; then by rows.
template <class T>
struct Multiplies {
    Multiply<T> widest, two, one, some;
    int most_vectors;
};

template <class T, int ROWS>
static constexpr Multiplies<T> of_rows() {
    constexpr int WIDEST = ROWS * (32 / REGISTERS) <= 2 ? 8 : ROWS * (32 / REGISTERS) <= 6 ? 4 : 2;
    return {multiply<T, ROWS, WIDEST, true>, multiply<T, ROWS, 2, true>, multiply<T, ROWS, 1, true>,
            multiply<T, ROWS, 1, false>, WIDEST};
}

template <class T, int... LESS_ONE>
static constexpr std::array<Multiplies<T>, MOST_ROWS + 1> by_rows(std::integer_sequence<int, LESS_ONE...>) {
    return {Multiplies<T>{}, of_rows<T, LESS_ONE + 1>()...};
}

template <class T>
static const auto MULTIPLIES = by_rows<T>(std::make_integer_sequence<int, MOST_ROWS>());

// One product, as its tiles see it.
struct Tile {
    const float* x;
    int64_t x_stride, inputs;
    float* out;
    int64_t out_stride;
    const float* residual;
    int64_t residual_stride;
    const Matrix* matrix;
    const Matrix* gated;  // silu(matrix) * gated where given; of the same kind
};

// Columns [begin, end) of `count` rows from `row`; `again` where rows before these had the same columns.
template <class T>
static void strip(const Tile& tile, int64_t row, int64_t count, int64_t begin, int64_t end, bool again) {
    const Multiplies<T>& ways = MULTIPLIES<T>[count];
    const float* x = tile.x + row * tile.x_stride;
    vec sums[MOST_ROWS * 8], others[MOST_ROWS * 8];
    for (int64_t column = begin; column < end;) {
        int64_t left = end - column, vectors = 1;
        Multiply<T> multiply = left < LANES ? ways.some : ways.one;
        if (left >= ways.most_vectors * LANES) multiply = ways.widest, vectors = ways.most_vectors;
        else if (left >= 2 * LANES) multiply = ways.two, vectors = 2;
        auto multiplied = [&](const Matrix& matrix, vec* into, const Matrix& then, int64_t skipped) {
            multiply(x, tile.x_stride, (const T*)matrix.weight + column, matrix.stride, tile.inputs, left,
                     (const T*)then.weight + column + skipped, again, into);
            for (int64_t v = 0; matrix.bias && v < vectors; v++) {
                vec bias = load_upto(matrix.bias + column + v * LANES, left);
                for (int64_t r = 0; r < count; r++) into[r * vectors + v] += bias;
            }
        };
        int64_t width = vectors * LANES;
        multiplied(*tile.matrix, sums, tile.gated && !again ? *tile.gated : *tile.matrix,
                   tile.gated && !again ? 0 : width);
        if (tile.gated) {
            multiplied(*tile.gated, others, again ? *tile.gated : *tile.matrix, width);
            for (int64_t i = 0; i < count * vectors; i++) sums[i] = silu(sums[i]) * others[i];
        }
        for (int64_t r = 0; r < count; r++) {
            for (int64_t v = 0; v < vectors; v++) {
                vec sum = sums[r * vectors + v];
                int64_t at = column + v * LANES;
                if (tile.residual) sum += load_upto(tile.residual + (row + r) * tile.residual_stride + at, left);
                store_upto(tile.out + (row + r) * tile.out_stride + at, sum, left);
            }
        }
        column += vectors * LANES;
    }
}

// Whether a copy of its columns, as floats, pays where many rows pass over them: the set of a cache line follows from
// its address modulo 4096, so that rows a multiple of FEW_SETS bytes apart drive each other out of the nearest cache.
static bool worth_packing(const Matrix& matrix) {
    return matrix.kind != FLOAT || matrix.stride * (int64_t)sizeof(float) % FEW_SETS == 0;
}

// Columns [begin, end) of a matrix as floats, their rows one behind the other in `into`.
static Matrix packed(const Matrix& matrix, int64_t inputs, int64_t begin, int64_t end, std::vector<float>& into) {
    int64_t width = end - begin;
    if ((int64_t)into.size() < inputs * width) into.resize(inputs * width);
    by_kind(matrix.kind, [&](auto number) {
        auto* weight = (const decltype(number)*)matrix.weight;
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t i = 0; i < width; i += LANES)
                store_upto(into.data() + k * width + i, load_upto(weight + k * matrix.stride + begin + i, width - i),
                           width - i);
    });
    return {into.data() - begin, matrix.bias, matrix.columns, width, FLOAT};
}

// Columns of a tile: the widest one that leaves the busiest thread the fewest columns, among those worth taking, some
// ten thousand multiplications or more.
static int64_t tile_width(int64_t columns, int64_t multiplications) {
    int64_t count = threads.count(), most_tiles = count == 1 ? 1 : std::clamp<int64_t>(multiplications / 30000, 1, 4 * count);
    int64_t best = columns, fewest = columns;
    for (int64_t tiles = 2; tiles <= most_tiles; tiles++) {
        int64_t width = (columns + tiles - 1) / tiles;
        width = std::max<int64_t>((width + LANES - 1) / LANES * LANES, 2 * LANES);
        int64_t busiest = ((columns + width - 1) / width + count - 1) / count * width;
        if (busiest < fewest) best = width, fewest = busiest;
    }
    return best;
}

// out [num_rows, all columns] = x [num_rows, inputs] * the matrices side by side; with `gated`, of which there is then
// one matrix, silu(x * matrix) * (x * gated).
static void products(const float* x, int64_t x_stride, int64_t num_rows, int64_t inputs, const Matrix* matrices,
                     int num_matrices, const Matrix* gated, const float* residual, int64_t residual_stride, float* out,
                     int64_t out_stride) {
    struct Part {
        int matrix;
        int64_t begin, end, offset;
    };
    int64_t total = 0;
    for (int m = 0; m < num_matrices; m++) total += matrices[m].columns;
    int64_t width = tile_width(total, num_rows * inputs * total * (gated ? 2 : 1));
    if (num_rows > MOST_ROWS) width = std::min<int64_t>(width, 1024);
    static thread_local std::vector<Part> parts;
    parts.clear();
    int64_t offset = 0;
    for (int m = 0; m < num_matrices; m++) {
        int64_t columns = matrices[m].columns;
        int64_t own = std::max<int64_t>(width, (columns + 8191) / 8192 * 32);
        for (int64_t begin = 0; begin < columns; begin += own)
            parts.push_back({m, begin, std::min(begin + own, columns), offset});
        offset += columns;
    }
    int64_t num_blocks = (num_rows + MOST_ROWS - 1) / MOST_ROWS;
    const Part* all_parts = parts.data();
    threads.share((int64_t)parts.size(), [&](int64_t index) {
        Part part = all_parts[index];
        Tile tile{x, x_stride, inputs, out + part.offset, out_stride,
                  residual ? residual + part.offset : nullptr, residual_stride, matrices + part.matrix, gated};
        // Strips that stay in the nearest cache while all rows pass.
        int64_t step = num_blocks > 1 ? 2 * LANES : part.end - part.begin;
        static thread_local std::vector<float> own, others;
        for (int64_t begin = part.begin; begin < part.end; begin += step) {
            int64_t end = std::min(begin + step, part.end);
            Matrix matrix = matrices[part.matrix], factor{};
            if (num_blocks >= WORTH_PACKING && worth_packing(matrix)) {
                matrix = packed(matrix, inputs, begin, end, own);
                if (gated) factor = packed(*gated, inputs, begin, end, others);
                tile.matrix = &matrix, tile.gated = gated ? &factor : nullptr;
            }
            for (int64_t block = 0; block < num_blocks; block++) {
                int64_t first = num_rows * block / num_blocks, last = num_rows * (block + 1) / num_blocks;
                by_kind(tile.matrix->kind, [&](auto number) {
                    strip<decltype(number)>(tile, first, last - first, begin, end, block > 0);
                });
            }
        }
    });
}
