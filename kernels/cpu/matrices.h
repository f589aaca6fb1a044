// Weight storage that matrix products read. A packed matrix consists of panels of PANEL columns, each of which stores
// its rows consecutively, so that the matrix is read from first byte to last. An input-major matrix is treated as
// panels side by side.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "groups.h"
#include "digits.h"

// bfloat16 numbers of two consecutive inputs of a column, the earlier in the lower half: one instruction widens either.
struct bfloat_pair {
    uint32_t bits;
};

// As `bfloat_pair`, for matrix products whose rows may be rounded to bfloat16 pairs too, because some processors
// multiply such pairs natively.
struct rounding_pair {
    uint32_t bits;
};

// An integer that the scale of its column multiplies.
struct eight_bits {
    int8_t value;
};

static inline vec load(const eight_bits* from) { return load_whole((const int8_t*)from); }

// Kinds that only packed matrices have, besides those of `Kind`; the formats of `groups.h` follow from FIRST_GROUPED
// on.
constexpr int64_t PAIRS = 3, ROUNDING_PAIRS = 4, BYTES = 5, FIRST_GROUPED = 6;

// Weights [inputs, columns] of `kind`. Rows are `stride` elements apart: whole rows if `panel` is 0, else the rows of a
// panel, and panels are `panel` elements apart. A row of pairs covers two inputs.
struct Matrix {
    const void* weight;
    const float* bias;  // [columns], or null
    int64_t columns, stride, panel, kind;
    const float* scales;  // [columns] if `kind` is BYTES, else null
    Groups groups;

    bool is_grouped() const { return kind >= FIRST_GROUPED; }

    bool is_packed() const { return panel != 0; }

    int64_t to_next_panel() const { return panel ? panel : PANEL; }

    // Address of the weights from a column on that begins a panel; the bias is not included.
    template <class T>
    const T* from(int64_t column) const {
        return (const T*)weight + column / PANEL * to_next_panel();
    }
};

// An input-major matrix, whose rows are `stride` elements apart.
static inline Matrix plain_matrix(const void* weight, const float* bias, int64_t columns, int64_t stride, int64_t kind) {
    return {weight, bias, columns, stride, 0, kind, nullptr, {}};
}

// Calls `run` with a value of the matrix's element type; only the type of the value matters.
template <class Run>
static inline void by_number(const Matrix& matrix, const Run& run) {
    if (HAS_PAIRS && matrix.kind == ROUNDING_PAIRS) run(rounding_pair{});
    else if (matrix.kind == BYTES) run(eight_bits{});
    else if (matrix.is_grouped())
        by_form(matrix.kind - FIRST_GROUPED, [&](auto form) {
            using Form = decltype(form);
            if constexpr (IS_WHOLE<Form>) {
                if (matrix.groups.rounded) return run(by_digits<Form, 1>{});
                if constexpr (EXACT_DIGITS > 0)
                    if (matrix.panel >= LEAST_SPLIT / Form::INPUTS * Form::ROWS * PANEL)
                        return run(by_digits<Form, EXACT_DIGITS>{});
            }
            run(form);
        });
    else if (matrix.kind >= PAIRS) run(bfloat_pair{});
    else by_kind(matrix.kind, run);
}

// Number of int8 digits of the rows that the matrix is multiplied by; 0 if the rows are floats.
static int digits_of(const Matrix& matrix) {
    int found = 0;
    by_number(matrix, [&](auto number) { found = DIGITS_OF<decltype(number)>; });
    return found;
}

static int64_t blocks_as_they_lie(int64_t kind) {
    int64_t found = 0;
    by_form(kind - FIRST_GROUPED, [&](auto form) { found = decltype(form)::BLOCKS; });
    return found;
}

// Unpacks the panel from `column` on into a packed float matrix in `into`.
static Matrix packed_panel(const Matrix& matrix, int64_t inputs, int64_t column, std::vector<float>& into) {
    if ((int64_t)into.size() < inputs * PANEL) into.resize(inputs * PANEL);
    int64_t left = matrix.columns - column;
    if (matrix.is_grouped()) {
        by_form(matrix.kind - FIRST_GROUPED, [&](auto form) {
            using Form = decltype(form);
            Groups groups = matrix.groups.from(column / PANEL, inputs, 0);
            unpack_panel((const uint8_t*)matrix.from<Form>(column), groups, inputs, form, into.data());
        });
    } else {
        by_kind(matrix.kind, [&](auto number) {
            auto* weight = matrix.from<decltype(number)>(column) + column % PANEL;
            for (int64_t k = 0; k < inputs; k++)
                for (int64_t i = 0; i < PANEL && i < left; i += LANES)
                    store(into.data() + k * PANEL + i, load_upto(weight + k * matrix.stride + i, left - i));
        });
    }
    return {into.data(), nullptr, left < PANEL ? left : PANEL, PANEL, inputs * PANEL, FLOAT, nullptr, {}};
}
