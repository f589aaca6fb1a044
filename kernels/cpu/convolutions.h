// Convolutions over the slots of a block, before and after a sublayer: y[i] = sum over taps of kernel[i, tap] * x[i -
// tap]. A kernel is a fixed base plus a dynamic term computed from the sublayer's normed inputs. x before a block's
// first slot is zero.
#pragma once

#include "products.h"

// Both convolutions of a sublayer: before the sublayer (side 0) and after it (side 1).
struct Convolution {
    const float* base;       // [2, num_taps, hidden]
    Matrix dynamic;          // [hidden, 2 * num_taps * hidden / group]
    int64_t num_taps, group;  // num_taps 0: no convolution; group: number of channels per dynamic kernel

    explicit operator bool() const { return num_taps > 0; }
};

// out [num_rows, hidden], plus `residual` if given. Rows are blocks of `num_slots`; `kernels` [num_rows, 2 * num_taps *
// num_groups] is the product of each row with `dynamic`.
static void convolve(const Convolution& conv, int64_t num_rows, int64_t num_slots, int64_t hidden, const float* kernels,
                     int64_t side, const float* x, const float* residual, float* out) {
    int64_t group = conv.group, num_groups = hidden / group, num_taps = conv.num_taps;
    by_row(num_rows, 2 * num_taps * hidden, [&](int64_t row) {
        const float* base = conv.base + side * num_taps * hidden;
        const float* own = kernels + (row * 2 + side) * num_taps * num_groups;
        int64_t within = std::min(num_taps, row % num_slots + 1);
        auto dynamic = [&](int64_t tap, int64_t c, int64_t left) {
            const float* of = own + tap * num_groups;
            if (group % LANES == 0) return all(of[c / group]);
            if (group == 1) return load_upto(of + c, left);
            vec lanes = {};
            for (int64_t lane = 0; lane < std::min(LANES, left); lane++) lanes[lane] = of[(c + lane) / group];
            return lanes;
        };
        for (int64_t c = 0; c < hidden; c += LANES) {
            int64_t left = hidden - c;
            vec sum = residual ? load_upto(residual + row * hidden + c, left) : vec{};
            for (int64_t tap = 0; tap < within; tap++) {
                vec kernel = load_upto(base + tap * hidden + c, left) + dynamic(tap, c, left);
                sum = fused(kernel, load_upto(x + (row - tap) * hidden + c, left), sum);
            }
            store_upto(out + row * hidden + c, sum, left);
        }
    });
}
