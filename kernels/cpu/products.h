// Matrix products of rows. A row's result does not depend on the other rows, because each element is one sum,
// accumulated in input order.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "matrices.h"
#include "threads.h"

// The sums of MOST_ROWS rows and a panel fit into the registers, together with their operands.
constexpr int MOST_ROWS = REGISTERS == 32 ? 12 : 6, MOST_PANELS = 4;
constexpr int AHEAD_BYTES = 4096, AHEAD_ROWS = 16, WORTH_PACKING = 3, FEW_SETS = 1024;

// Most rows that are multiplied at once. Sums of digits are kept in memory, so more rows share the unpacked weights.
template <class T>
constexpr int MOST_ROWS_OF = DIGITS_OF<T> ? 16 : MOST_ROWS;

// Calls `run` with `count`, 1 to MOST, as a type.
template <int MOST, class Run>
static inline __attribute__((always_inline)) void by_count(int count, const Run& run) {
    if constexpr (MOST > 1)
        if (count < MOST) return by_count<MOST - 1>(count, run);
    run(std::integral_constant<int, MOST>{});
}

// Some panels of a matrix, and the panels that are multiplied next. The next panels are prefetched during the whole
// pass if the present panels were read before (`again`), else at the end of the pass.
template <class T>
struct Strip {
    const T* weight;
    int64_t stride, panel, inputs;
    int64_t last;  // number of columns that are left
    const float* scales;  // from the strip's first column on, or null
    const T* next;
    // Non-zero: panels were read before. 64 bits, not a bool: if a register that was spilled as a byte is read back as
    // a word, the read stalls.
    int64_t again;
    Groups groups;
    int64_t vector;  // first vector of columns within a panel of groups
};

// Distance in rows at which weights are prefetched, long enough for memory latency.
template <class T>
static int64_t rows_ahead(const Strip<T>& strip) {
    return strip.stride == PANEL ? AHEAD_BYTES / (PANEL * (int64_t)sizeof(T)) : AHEAD_ROWS;
}

// As `multiply`, for a group-quantized matrix.
template <class T, int ROWS, int PANELS, bool NARROW>
__attribute__((noinline)) static void multiply_groups(const float* x, int64_t x_stride, const Strip<T>& strip, vec* sums) {
    constexpr int EACH = NARROW ? 1 : 2, VECTORS = PANELS * EACH, UNIT = T::ROWS * PANEL;
    int64_t num_groups = strip.inputs / strip.groups.size, units = strip.groups.size / T::INPUTS;
    const uint8_t* weight = (const uint8_t*)strip.weight;
    vec kept[ROWS][VECTORS] = {};
    for (int64_t group = 0; group < num_groups; group++) {
        vec scale[VECTORS], shift[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            strip.groups.read(group, v / EACH, num_groups, v % EACH * LANES, FactorOf<T>::VALUE, scale[v], shift[v]);
        for (int panel = 0; panel < PANELS; panel++)
            for (int64_t ahead = 0; ahead < units * UNIT; ahead += CACHE_LINE)
                __builtin_prefetch(weight + panel * strip.panel + AHEAD_BYTES / PANELS + ahead, 0, 3);
        for (int64_t unit = 0; unit < units; unit++, weight += UNIT, x += T::INPUTS) {
#pragma GCC unroll 8
            for (int input = 0; input < T::INPUTS; input++) {
                vec columns[VECTORS];
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) {
                    vec number = T::number(weight + v / EACH * strip.panel, strip.vector + v % EACH, input);
                    columns[v] = fused(number, scale[v], shift[v]);
                }
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; row++) {
                    vec one = all(x[row * x_stride + input]);
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; v++) kept[row][v] = fused(one, columns[v], kept[row][v]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) sums[row * VECTORS + v] = kept[row][v];
}

// Whether signed weights are multiplied as unsigned ones, larger by SIGNED_EXCESS.
template <class T>
constexpr bool EXCEEDS = T::SIGNED && SIGNED_EXCESS;

static inline int32_t word_at(const float* from) {
    int32_t word;
    memcpy(&word, from, sizeof(word));
    return word;
}

// Adds to `kept` the products of ROWS rows with the weights of a step, [VECTORS][STEP / 4]. The weights are unpacked once
// for all rows of a block, and stay in registers.
template <class T, int STEP, int VECTORS, int ROWS>
static inline __attribute__((always_inline)) void add_step(const float* x, int64_t x_stride,
                                                           const words (&weights)[VECTORS][STEP / 4],
                                                           const vec* scale, const vec* shift, vec* kept) {
    constexpr int DIGITS = T::DIGITS;
    constexpr DigitRows LAYOUT(STEP, STEP, DIGITS);
    const float* own[ROWS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) {
        own[row] = x + row * x_stride;
        asm("" : "+r"(own[row]));  // keeps compilers from computing each word's address from `x`
    }
    ints sums[DIGITS][ROWS][VECTORS];
#pragma GCC unroll 3
    for (int digit = 0; digit < DIGITS; digit++)
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                sums[digit][row][v] =
                    EXCEEDS<T> ? all_whole(word_at(own[row] + LAYOUT.excess + digit)) : ints{};
#pragma GCC unroll 8
    for (int four = 0; four < STEP / 4; four++)
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 3
            for (int digit = 0; digit < DIGITS; digit++)
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++)
                    sums[digit][row][v] = dots<T::SIGNED && !EXCEEDS<T>>(
                        sums[digit][row][v], weights[v][four], word_at(own[row] + four * DIGITS + digit));
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) {
        vec by = all(own[row][LAYOUT.scale]), sum = all(own[row][LAYOUT.sum]);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            ints high = sums[0][row][v];
            if constexpr (DIGITS == 3) high = (high << 8) + sums[1][row][v];  // below 2^30
            vec whole = as_floats((words)high);
            if constexpr (DIGITS == 3) whole = fused(whole, all(256), as_floats((words)sums[2][row][v]));
            vec& total = kept[row * VECTORS + v];
            total = fused(fused(whole, scale[v], shift[v] * sum), by, total);
        }
    }
}

// As `multiply_digits`, for groups of whole steps of STEP inputs.
template <class T, int STEP, int VECTORS>
static inline void multiply_steps(const float* x, int64_t x_stride, const Strip<T>& strip, int num_rows, vec* kept) {
    constexpr int UNIT = T::ROWS * PANEL, BYTES = STEP / T::INPUTS * UNIT;
    constexpr int AT_ONCE = T::DIGITS > 1 ? 2 : REGISTERS == 32 ? 6 : 4;  // rows whose sums stay in registers
    int64_t num_groups = strip.inputs / strip.groups.size;
    const uint8_t* weight = (const uint8_t*)strip.weight;
    constexpr DigitRows LAYOUT(STEP, STEP, T::DIGITS);
    const int parts = (num_rows + AT_ONCE - 1) / AT_ONCE, least = num_rows / parts, more = num_rows % parts;
    for (int64_t group = 0; group < num_groups; group++) {
        vec scale[VECTORS], shift[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) strip.groups.read(group, 0, num_groups, v * LANES, 1, scale[v], shift[v]);
        for (int64_t end = 0; end < strip.groups.size; end += STEP, weight += BYTES, x += LAYOUT.step) {
#pragma GCC unroll 16
            for (int ahead = 0; ahead < BYTES; ahead += CACHE_LINE)
                __builtin_prefetch(weight + AHEAD_BYTES + ahead, 0, 3);
            words weights[VECTORS][STEP / 4];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 8
                for (int four = 0; four < STEP / 4; four++)
                    weights[v][four] = T::four(weight + four * 4 / T::INPUTS * UNIT, strip.vector + v,
                                               four * 4 % T::INPUTS / 4) ^
                                       (EXCEEDS<T> ? 0x80808080 : 0);
            for (int row = 0, part = 0, some = 0; row < num_rows; row += some, part++) {
                auto run = [&](auto count) __attribute__((always_inline)) {
                    add_step<T, STEP, VECTORS, decltype(count)::value>(x + row * x_stride, x_stride, weights, scale,
                                                                       shift, kept + row * VECTORS);
                };
                some = least + (part < more);
                by_count<AT_ONCE>(some, run);
            }
        }
    }
}

// As `multiply_groups`, for rows of int8 digits (`DigitRows`).
template <class T, bool NARROW>
__attribute__((noinline)) static void multiply_digits(const float* x, int64_t x_stride, const Strip<T>& strip,
                                                      int num_rows, vec* sums) {
    constexpr int VECTORS = NARROW ? 1 : 2;
    vec kept[MOST_ROWS_OF<T> * VECTORS];
    for (int i = 0; i < num_rows * VECTORS; i++) kept[i] = vec{};
    switch (step_of(strip.groups.size)) {
        case 32: multiply_steps<T, 32, VECTORS>(x, x_stride, strip, num_rows, kept); break;
        case 16: multiply_steps<T, 16, VECTORS>(x, x_stride, strip, num_rows, kept); break;
        default: multiply_steps<T, 8, VECTORS>(x, x_stride, strip, num_rows, kept);
    }
    for (int i = 0; i < num_rows * VECTORS; i++) sums[i] = kept[i];
}

template <class T, int ROWS, bool NARROW>
static void multiply_digits_of(const float* x, int64_t x_stride, const Strip<T>& strip, vec* sums) {
    multiply_digits<T, NARROW>(x, x_stride, strip, ROWS, sums);
}

// sums[row][vector] = x[row] * strip, for ROWS rows and PANELS panels; NARROW panels have one vector. For
// `rounding_pair`, rows are bfloat16 pairs as well.
template <class T, int ROWS, int PANELS, bool NARROW, bool WHOLE>
__attribute__((noinline)) static void multiply(const float* x, int64_t x_stride, const Strip<T>& strip, vec* sums) {
    constexpr bool DOTS = std::is_same<T, rounding_pair>::value;
    constexpr bool PAIRED = std::is_same<T, bfloat_pair>::value, SCALED = std::is_same<T, eight_bits>::value;
    constexpr int EACH = NARROW ? 1 : 2, VECTORS = PANELS * EACH;
    vec kept[ROWS][VECTORS] = {};
    auto add = [&](int64_t k, const vec* columns) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            vec scale = all(x[row * x_stride + k]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++)
                kept[row][v] = DOTS ? fused_pairs(scale, columns[v], kept[row][v]) : fused(scale, columns[v], kept[row][v]);
        }
    };
    auto pass = [&](int64_t begin, int64_t end, int64_t ahead, bool second = true) __attribute__((always_inline)) {
        for (int64_t k = begin; k < end; k++) {
            vec columns[VECTORS], later[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                const T* from = strip.weight + k * strip.stride + v / EACH * strip.panel + v % EACH * LANES;
                if (v % EACH * LANES % (CACHE_LINE / (int64_t)sizeof(T)) == 0) __builtin_prefetch(from + ahead, 0, 3);
                if constexpr (DOTS) {
                    columns[v] = load((const float*)from);
                } else if constexpr (PAIRED) {
                    words pairs = *(const loose_words*)from;
                    columns[v] = (vec)(pairs << 16), later[v] = (vec)(pairs & 0xffff0000u);
                } else {
                    columns[v] = WHOLE ? load(from) : load_some(from, strip.last);
                }
            }
            add(PAIRED ? 2 * k : k, columns);
            if (PAIRED && second) add(2 * k + 1, later);
        }
    };
    int64_t rows = DOTS ? (strip.inputs + 1) / 2 : PAIRED ? strip.inputs / 2 : strip.inputs, ahead = rows_ahead(strip);
    int64_t alone = strip.again || rows < ahead ? 0 : rows - ahead;
    pass(0, alone, ahead * strip.stride);
    pass(alone, rows, strip.next - strip.weight - (strip.again ? 0 : alone * strip.stride));
    if (PAIRED && strip.inputs % 2) pass(rows, rows + 1, 0, false);
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
        int64_t left = strip.last - v * LANES;
        vec scale = SCALED && left > 0 ? load_upto(strip.scales + v * LANES, left) : vec{};
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) sums[row * VECTORS + v] = SCALED ? kept[row][v] * scale : kept[row][v];
    }
}

template <class T>
using Multiply = void (*)(const float*, int64_t, const Strip<T>&, vec*);

// Variants by number of columns: as many panels as the registers allow for that many rows; one panel; one vector; part
// of a vector.
template <class T>
struct Multiplies {
    Multiply<T> widest, panel, vector, some;
    int most_panels;
};

template <class T, int ROWS, int PANELS, bool NARROW, bool WHOLE>
static constexpr Multiply<T> way() {
    if constexpr (DIGITS_OF<T> > 0) return multiply_digits_of<T, ROWS, NARROW>;
    else if constexpr (IS_GROUPED<T>) return multiply_groups<T, ROWS, PANELS, NARROW>;
    else return multiply<T, ROWS, PANELS, NARROW, WHOLE>;
}

template <class T, int ROWS>
static constexpr Multiplies<T> of_rows() {
    constexpr int MOST = ROWS * (32 / REGISTERS) <= 2 ? 4 : ROWS * (32 / REGISTERS) <= 6 ? 2 : 1;
    // Grouped weights use one panel at a time, because unpacking takes registers too. Other weights use several panels
    // for few rows, whose sums over a single panel would form a dependency chain.
    constexpr int WIDEST = IS_GROUPED<T> ? 1 : MOST;
    // Pairs and groups are always packed, and a packed panel is whole.
    return {way<T, ROWS, WIDEST, false, true>(), way<T, ROWS, 1, false, true>(),
            way<T, ROWS, 1, true, true>(), way<T, ROWS, 1, true, false>(), WIDEST};
}

template <class T, int... LESS_ONE>
static constexpr std::array<Multiplies<T>, sizeof...(LESS_ONE) + 1> by_rows(std::integer_sequence<int, LESS_ONE...>) {
    return {Multiplies<T>{}, of_rows<T, LESS_ONE + 1>()...};
}

template <class T>
static const auto MULTIPLIES = by_rows<T>(std::make_integer_sequence<int, MOST_ROWS_OF<T>>());

// Activation of a gated MLP's gate; values are shared with Python.
enum Gate : int64_t { SILU, GELU_TANH };

template <class Run>
static inline void by_gate(int64_t gate, const Run& run) {
    if (gate == GELU_TANH) run(gelu_tanh);
    else run(silu);
}

// Rows of inputs in the form that a matrix is multiplied by.
struct Inputs {
    const float* from;
    int64_t stride;
};

// Arguments of one matrix product, which all of its tiles share.
struct Tile {
    Inputs rows, gated_rows;
    int64_t inputs;
    float* out;
    int64_t out_stride;
    const float* residual;
    int64_t residual_stride;
    const Matrix* matrix;
    const Matrix* gated;  // if given, computes gate(x * matrix) * (x * gated); same kind as `matrix`
    int64_t gate;         // a `Gate`
    int64_t skipped;      // number of output columns before the matrices' first column
};

// Computes columns [begin, end) of `count` rows from `row` on. `again` is non-zero if earlier rows had the same
// columns. `begin` must be the first column of a vector.
template <class T>
static void strip(const Tile& tile, int64_t row, int64_t count, int64_t begin, int64_t end, int64_t again) {
    const Multiplies<T>& ways = MULTIPLIES<T>[count];
    vec sums[MOST_ROWS * 2 * MOST_PANELS], others[MOST_ROWS * 2 * MOST_PANELS];  // rows of digits: of one panel
    for (int64_t column = begin; column < end;) {
        int64_t left = end - column, vectors = 1, own = column - tile.skipped, within = own % PANEL;
        bool packed = tile.matrix->is_packed();
        Multiply<T> multiply = left < LANES && !packed ? ways.some : ways.vector;
        if (packed && within) left = std::min(left, PANEL - within);
        else if (left >= ways.most_panels * PANEL) multiply = ways.widest, vectors = 2 * ways.most_panels;
        else if (left >= PANEL || (packed && left > LANES)) multiply = ways.panel, vectors = 2;
        auto multiplied = [&](const Inputs& rows, const Matrix& matrix, vec* into, const Matrix& then, int64_t width) {
            Strip<T> strip{matrix.from<T>(own) + (IS_GROUPED<T> ? 0 : within), matrix.stride, matrix.to_next_panel(), tile.inputs, left,
                           matrix.scales ? matrix.scales + column : nullptr,
                           then.from<T>(own + width) + (own + width) % PANEL, again,
                           matrix.is_grouped() ? matrix.groups.from(own / PANEL, tile.inputs, within) : Groups{},
                           within / LANES};
            multiply(rows.from + row * rows.stride, rows.stride, strip, into);
        };
        auto biased = [&](const Matrix& matrix, vec* into) {
            for (int64_t v = 0; matrix.bias && v < vectors && v * LANES < left; v++) {
                vec bias = load_upto(matrix.bias + column + v * LANES, left - v * LANES);
                for (int64_t r = 0; r < count; r++) into[r * vectors + v] += bias;
            }
        };
        int64_t width = vectors * LANES;
        for (int64_t r = 0; r < count; r++) {  // output rows are too short for hardware prefetching
            __builtin_prefetch(tile.out + (row + r) * tile.out_stride + column, 1, 3);
            if (tile.residual) __builtin_prefetch(tile.residual + (row + r) * tile.residual_stride + column, 0, 3);
        }
        bool turns = tile.gated && !again;
        multiplied(tile.rows, *tile.matrix, sums, turns ? *tile.gated : *tile.matrix, turns ? 0 : width);
        biased(*tile.matrix, sums);
        if (tile.gated) {
            multiplied(tile.gated_rows, *tile.gated, others, again ? *tile.gated : *tile.matrix, width);
            biased(*tile.gated, others);
            by_gate(tile.gate, [&](auto active) {
                for (int64_t i = 0; i < count * vectors; i++) sums[i] = active(sums[i]) * others[i];
            });
        }
        for (int64_t r = 0; r < count; r++) {
            for (int64_t v = 0; v < vectors && v * LANES < left; v++) {
                vec sum = sums[r * vectors + v];
                int64_t at = column + v * LANES, rest = left - v * LANES;
                if (tile.residual) sum += load_upto(tile.residual + (row + r) * tile.residual_stride + at, rest);
                store_upto(tile.out + (row + r) * tile.out_stride + at, sum, rest);
            }
        }
        column += width;
    }
}

// Whether to multiply `num_blocks` blocks of rows by a packed float copy of the columns. The copy pays for float
// matrices whose rows are a multiple of FEW_SETS bytes apart: a cache line's set follows from its address modulo 4096,
// so such rows evict each other from the L1 cache.
static bool worth_packing(const Matrix& matrix, int64_t num_blocks) {
    if (digits_of(matrix)) return false;
    if (matrix.is_grouped()) return num_blocks > blocks_as_they_lie(matrix.kind);
    if (matrix.is_packed() || num_blocks < WORTH_PACKING) return false;
    return matrix.kind != FLOAT || matrix.stride * (int64_t)sizeof(float) % FEW_SETS == 0;
}

// Computes all rows of a tile over columns [begin, end).
static void all_rows(Tile tile, int64_t num_rows, int64_t begin, int64_t end) {
    static thread_local std::vector<float> own, others;
    int64_t most_rows = MOST_ROWS;
    by_number(*tile.matrix, [&](auto number) { most_rows = MOST_ROWS_OF<decltype(number)>; });
    int64_t num_blocks = (num_rows + most_rows - 1) / most_rows;
    bool copied = worth_packing(*tile.matrix, num_blocks);
    const Matrix *matrix = tile.matrix, *gated = tile.gated;
    Matrix first, second;
    for (int64_t column = begin, until = end; column < end; column = until) {
        // All rows are multiplied by one panel before the next, so that the panel stays in the nearest caches.
        if (copied || num_blocks > 1) until = std::min((column / PANEL + 1) * PANEL, end);
        if (copied) {
            // Groups are unpacked in whole panels, but a tile may begin within a panel.
            int64_t begins = matrix->is_grouped() ? column / PANEL * PANEL : column;
            first = packed_panel(*matrix, tile.inputs, begins, own), first.bias = matrix->bias;
            if (gated) second = packed_panel(*gated, tile.inputs, begins, others), second.bias = gated->bias;
            tile.matrix = &first, tile.gated = gated ? &second : nullptr, tile.skipped = begins;
        }
        for (int64_t block = 0; block < num_blocks; block++) {
            int64_t from = num_rows * block / num_blocks, to = num_rows * (block + 1) / num_blocks;
            by_number(*tile.matrix, [&](auto number) {
                strip<decltype(number)>(tile, from, to - from, column, until, block);
            });
        }
    }
}

// Columns of a tile: the widest tile that leaves the busiest thread the fewest columns, among tiles of at least 30,000
// multiplications.
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

// Processes rows in parts of at least 32768 elements, because a smaller part would be finished before another thread
// could start.
template <class Run>
static void by_row(int64_t num_rows, int64_t width, const Run& run) {
    int64_t num_tiles = std::clamp<int64_t>(num_rows * width / 32768, 1, std::min<int64_t>(num_rows, 64));
    threads.share(num_tiles, [&](int64_t tile) {
        for (int64_t row = num_rows * tile / num_tiles; row < num_rows * (tile + 1) / num_tiles; row++) run(row);
    });
}

// Converts float rows to bfloat16 pairs, with a 0 after an odd last element: [num_rows, (inputs + 1) / 2].
static const float* as_pairs(const float* x, int64_t x_stride, int64_t num_rows, int64_t inputs) {
    static thread_local std::vector<bfloat> scratch;
    int64_t width = inputs + inputs % 2, most = num_rows * width;
    if ((int64_t)scratch.size() < most) scratch.resize(most);
    bfloat* pairs = scratch.data();
    by_row(num_rows, width, [&](int64_t row) {
        pairs[row * width + width - 1].bits = 0;
        for (int64_t i = 0; i < inputs; i += LANES)
            store_upto(pairs + row * width + i, load_upto(x + row * x_stride + i, inputs - i), inputs - i);
    });
    return (const float*)pairs;
}

// Rounds float rows to numbers of int8 digits: [num_rows, DigitRows::stride].
static const float* as_digits(const float* x, int64_t x_stride, int64_t num_rows, int64_t inputs, int64_t step,
                               int digits, std::vector<float>& scratch) {
    int64_t stride = DigitRows(inputs, step, digits).stride;
    if ((int64_t)scratch.size() < num_rows * stride) scratch.resize(num_rows * stride);
    float* rounded = scratch.data();
    by_row(num_rows, inputs, [&](int64_t row) {
        (digits == 1 ? round_row : split_row)(x + row * x_stride, inputs, step, rounded + row * stride);
    });
    return rounded;
}

// out [num_rows, all columns] = x [num_rows, inputs] * the matrices, concatenated. With `gated` (and a single matrix):
// gate(x * matrix) * (x * gated).
static void products(const float* x, int64_t x_stride, int64_t num_rows, int64_t inputs, const Matrix* matrices,
                     int num_matrices, const Matrix* gated, const float* residual, int64_t residual_stride, float* out,
                     int64_t out_stride, int64_t gate = SILU) {
    struct Part {
        int matrix;
        int64_t begin, end, offset;
        Inputs rows;
    };
    // Rows of digits, by the number of digits and the step.
    static thread_local std::vector<float> scratch[2][3];
    if (HAS_PAIRS && matrices[0].kind == ROUNDING_PAIRS)
        x = as_pairs(x, x_stride, num_rows, inputs), x_stride = (inputs + 1) / 2;
    Inputs rounded[2][3] = {};
    auto rows_of = [&](const Matrix& matrix) {
        int digits = digits_of(matrix);
        if (!digits) return Inputs{x, x_stride};
        int64_t step = step_of(matrix.groups.size), which = step / 16;
        Inputs& own = rounded[digits > 1][which];
        if (!own.from)
            own = {as_digits(x, x_stride, num_rows, inputs, step, digits, scratch[digits > 1][which]),
                   DigitRows(inputs, step, digits).stride};
        return own;
    };
    Inputs gated_rows = gated ? rows_of(*gated) : Inputs{};
    int64_t total = 0;
    for (int m = 0; m < num_matrices; m++) total += matrices[m].columns;
    int64_t width = tile_width(total, num_rows * inputs * total * (gated ? 2 : 1));
    if (num_rows > MOST_ROWS) width = std::min<int64_t>(width, 1024);
    static thread_local std::vector<Part> parts;
    parts.clear();
    int64_t offset = 0;
    for (int m = 0; m < num_matrices; m++) {
        int64_t columns = matrices[m].columns;
        Inputs rows = rows_of(matrices[m]);
        int64_t own = std::max<int64_t>(width, (columns + 8191) / 8192 * 32);
        for (int64_t begin = 0; begin < columns; begin += own)
            parts.push_back({m, begin, std::min(begin + own, columns), offset, rows});
        offset += columns;
    }
    const Part* all_parts = parts.data();
    threads.share((int64_t)parts.size(), [&](int64_t index) {
        Part part = all_parts[index];
        Tile tile{part.rows, gated_rows, inputs, out + part.offset, out_stride,
                  residual ? residual + part.offset : nullptr, residual_stride, matrices + part.matrix, gated, gate, 0};
        all_rows(tile, num_rows, part.begin, part.end);
    });
}
