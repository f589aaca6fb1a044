// Group-quantized weights of few bits: inputs of a column that share a scale and a shift. A weight is number * scale +
// shift, rounded once to float32; matrix products use these float32 weights.
#pragma once

#include <cstdint>

#include "vectors.h"

// Columns of a panel: as many as a kernel of many rows can keep sums of in registers.
constexpr int64_t PANEL = 2 * LANES;

// Number formats. A unit stores `INPUTS` inputs of all columns of a panel, in `ROWS` bytes per column. `number` reads
// an input of a unit as floats; `four` reads four integers as bytes, for products with rounded rows; `vector` selects
// the panel's columns that are read; `put` stores a unit of one column. Up to `BLOCKS` blocks of rows are multiplied by
// the stored numbers directly; more blocks share an unpacked panel. Each struct has one byte, so that pointer
// arithmetic counts bytes.
struct grouped_bytes {
    uint8_t byte;
    static constexpr int INPUTS = 4, ROWS = 4, BLOCKS = 2;
    static constexpr bool SIGNED = true;
    static words four(const uint8_t* unit, int64_t vector, int) { return load_words(unit + vector * 4 * LANES); }
    static vec number(const uint8_t* unit, int64_t vector, int input) {
        return as_floats((words)((ints)(four(unit, vector, 0) << (24 - 8 * input)) >> 24));
    }
    static void put(const uint8_t* numbers, uint8_t* unit, int64_t column) { memcpy(unit + 4 * column, numbers, 4); }
};

// 4-bit numbers: the first four inputs of a unit are in the lower halves of its four bytes.
struct grouped_nibbles {
    uint8_t byte;
    static constexpr int INPUTS = 8, ROWS = 4, BLOCKS = 2;
    static constexpr bool SIGNED = false;
    static words all_of(const uint8_t* unit, int64_t vector) { return load_words(unit + vector * 4 * LANES); }
    static words four(const uint8_t* unit, int64_t vector, int half) {
        return all_of(unit, vector) >> 4 * half & 0x0f0f0f0f;
    }
    static words whole(const uint8_t* unit, int64_t vector, int input) {
        return all_of(unit, vector) >> (input % 4 * 8 + input / 4 * 4) & 15;
    }
    static vec number(const uint8_t* unit, int64_t vector, int input) { return as_floats(whole(unit, vector, input)); }
    static void put(const uint8_t* numbers, uint8_t* unit, int64_t column) {
        for (int i = 0; i < 4; i++) unit[4 * column + i] = (numbers[i] & 15) | numbers[4 + i] << 4;
    }
};

// Doubled E2M1 floats (two exponent bits, one mantissa bit): integers, looked up in a table.
struct grouped_e2m1 {
    uint8_t byte;
    static constexpr int INPUTS = 8, ROWS = 4, BLOCKS = 2;
    static constexpr bool SIGNED = true;
    static words four(const uint8_t* unit, int64_t vector, int half) {
        alignas(16) static const int8_t TABLE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        words codes = grouped_nibbles::four(unit, vector, half);
#if defined(__AVX512BW__)
        __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)TABLE));
        return (words)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
        __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)TABLE));
        return (words)_mm256_shuffle_epi8(table, (__m256i)codes);
#else
        uint8_t bytes[4 * LANES];
        memcpy(bytes, &codes, sizeof(codes));
        for (uint8_t& code : bytes) code = TABLE[code];
        memcpy(&codes, bytes, sizeof(codes));
        return codes;
#endif
    }
    static vec number(const uint8_t* unit, int64_t vector, int input) {
        return as_floats((words)((ints)(four(unit, vector, input / 4) << (24 - input % 4 * 8)) >> 24));
    }
    static void put(const uint8_t* numbers, uint8_t* unit, int64_t column) { grouped_nibbles::put(numbers, unit, column); }
};

// Numbers of 4 + BITS bits: a panel's unit holds the low 4 bits of all numbers, then BITS high bits per number, with
// those of the first input in the lowest bits.
template <int BITS>
struct grouped_planes {
    uint8_t byte;
    static constexpr int INPUTS = 8, ROWS = 4 + BITS, BLOCKS = 1;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MASK = (1 << BITS) - 1;
    static words more(const uint8_t* unit, int64_t vector) {
        const uint8_t* from = unit + 4 * PANEL + vector * BITS * LANES;
        return BITS == 1 ? load_bytes(from) : __builtin_convertvector(*(const loose_halves*)from, words);
    }
    static words four(const uint8_t* unit, int64_t vector, int half) {
        words bits = more(unit, vector) >> 4 * BITS * half & ((1 << 4 * BITS) - 1);
        bits = (bits | bits << (16 - 2 * BITS)) & (((1 << 2 * BITS) - 1) * 0x10001u);
        bits = (bits | bits << (8 - BITS)) & MASK * 0x1010101u;
        return grouped_nibbles::four(unit, vector, half) | bits << 4;
    }
    static vec number(const uint8_t* unit, int64_t vector, int input) {
        return as_floats(grouped_nibbles::whole(unit, vector, input) | (more(unit, vector) >> BITS * input & MASK) << 4);
    }
    static void put(const uint8_t* numbers, uint8_t* unit, int64_t column) {
        grouped_nibbles::put(numbers, unit, column);
        uint32_t bits = 0;
        for (int i = 0; i < INPUTS; i++) bits |= numbers[i] >> 4 << BITS * i;
        for (int i = 0; i < BITS; i++) unit[4 * PANEL + column * BITS + i] = bits >> 8 * i;
    }
};

// E4M3 floats, shifted into float16 without adjusting the exponent: `FACTOR`, multiplied into the scales, corrects it.
struct grouped_e4m3 {
    uint8_t byte;
    static constexpr int INPUTS = 2, ROWS = 2, BLOCKS = 1;
    static constexpr float FACTOR = 0x1p8f;
    static vec number(const uint8_t* unit, int64_t vector, int input) {
        halves bits = load_short(unit + input * PANEL + vector * LANES);
        return from_halves((bits & 0x80) << 8 | (bits & 0x7f) << 7);
    }
    static void put(const uint8_t* numbers, uint8_t* unit, int64_t column) {
        for (int i = 0; i < INPUTS; i++) unit[i * PANEL + column] = numbers[i];
    }
};

// Packs numbers [columns, inputs], a byte each, into panels; missing columns of the last panel are left untouched. Rows
// are copied in cache lines first, because a panel's columns may lie a multiple of the L1 cache's set stride apart.
template <class T>
static void pack_panels(const uint8_t* values, int64_t column_stride, int64_t input_stride, int64_t columns, int64_t inputs,
                        T, uint8_t* into) {
    uint8_t rows[PANEL][CACHE_LINE];
    for (int64_t column = 0; column < columns; column += PANEL) {
        int64_t width = std::min(columns - column, PANEL);
        for (int64_t begin = 0; begin < inputs; begin += CACHE_LINE) {
            int64_t count = std::min<int64_t>(inputs - begin, CACHE_LINE);
            const uint8_t* from = values + column * column_stride + begin * input_stride;
            for (int64_t i = 0; i < width && input_stride == 1; i++) memcpy(rows[i], from + i * column_stride, count);
            for (int64_t k = 0; k < count && input_stride != 1; k++)
                for (int64_t i = 0; i < width; i++) rows[i][k] = from[k * input_stride + i * column_stride];
            for (int64_t k = 0; k < count; k += T::INPUTS, into += T::ROWS * PANEL)
                for (int64_t i = 0; i < width; i++) T::put(rows[i] + k, into, i);
        }
    }
}

// Calls `run` with a value of the format with that index.
template <class Run>
static inline void by_form(int64_t index, const Run& run) {
    switch (index) {
        case 0: return run(grouped_bytes{});
        case 1: return run(grouped_nibbles{});
        case 2: return run(grouped_planes<1>{});
        case 3: return run(grouped_planes<2>{});
        case 4: return run(grouped_e4m3{});
        default: return run(grouped_e2m1{});
    }
}

template <class T, class = int>
struct FactorOf {
    static constexpr float VALUE = 1;
};
template <class T>
struct FactorOf<T, decltype((void)T::FACTOR, 0)> {
    static constexpr float VALUE = T::FACTOR;
};

template <class T, class = int>
constexpr bool IS_GROUPED = false;
template <class T>
constexpr bool IS_GROUPED<T, decltype((void)T::INPUTS, 0)> = true;

template <class T, class = int>
constexpr bool IS_WHOLE = false;
template <class T>
constexpr bool IS_WHOLE<T, decltype((void)T::SIGNED, 0)> = true;

// An integer format whose numbers are multiplied by rows of int8 digits (`digits.h`).
template <class T, int NUM_DIGITS>
struct by_digits : T {
    static constexpr int DIGITS = NUM_DIGITS;
};

// Number of digits of the rows that a weight is multiplied by; 0 if the rows are floats.
template <class T, class = int>
constexpr int DIGITS_OF = 0;
template <class T>
constexpr int DIGITS_OF<T, decltype((void)T::DIGITS, 0)> = T::DIGITS;

// Types of scales and shifts: a `Kind`, or 8-bit integers.
enum ScaleKind : int64_t { WHOLE = 3, SIGNED = 4 };

// Scales by panel [num_groups, PANEL]; each is multiplied by its entry of `by` [num_groups / each, PANEL], if given.
struct Scales {
    const void* numbers;
    const half* by;
    int64_t kind, each;

    Scales from(int64_t panel, int64_t num_groups, int64_t within) const {
        if (!numbers) return *this;
        int64_t size = kind == FLOAT ? 4 : kind == BFLOAT || kind == HALF ? 2 : 1;
        return {(const char*)numbers + (panel * num_groups * PANEL + within) * size,
                by ? by + panel * (num_groups / each) * PANEL + within : nullptr, kind, each};
    }

    vec at(int64_t group, int64_t panel, int64_t num_groups, int64_t within) const {
        if (kind != HALF || by) return made(group, panel, num_groups, within);
        return load((const half*)numbers + (panel * num_groups + group) * PANEL + within);
    }

    // Scales other than plain float16; not inlined, so that the many product variants stay small.
    __attribute__((noinline)) vec made(int64_t group, int64_t panel, int64_t num_groups, int64_t within) const {
        int64_t place = (panel * num_groups + group) * PANEL + within;
        vec found;
        switch (kind) {
            case FLOAT: found = load((const float*)numbers + place); break;
            case BFLOAT: found = load((const bfloat*)numbers + place); break;
            case HALF: found = load((const half*)numbers + place); break;
            case WHOLE: found = as_floats(load_bytes((const uint8_t*)numbers + place)); break;
            default: found = load_whole((const int8_t*)numbers + place);
        }
        if (!by) return found;
        const half* own = by + (panel * (num_groups / each) + group / each) * PANEL + within;
        return found * load(own);
    }
};

// Groups of `size` inputs. A shift is `shifts`; or -shifts * scale if `are_zeros`; or offset * scale without `shifts`.
// `rounded`: rows are rounded to int8 before they are multiplied.
struct Groups {
    Scales scales, shifts;
    int64_t size;
    float offset;
    int32_t are_zeros;
    int64_t rounded;

    // Returns the same groups, beginning at a panel and at a column within that panel.
    Groups from(int64_t panel, int64_t inputs, int64_t within) const {
        int64_t count = inputs / size;
        return {scales.from(panel, count, within), shifts.from(panel, count, within), size, offset, are_zeros, rounded};
    }

    // Reads scale and shift of a group for a vector of columns; `factor` is the format's.
    void read(int64_t group, int64_t panel, int64_t num_groups, int64_t within, float factor, vec& scale, vec& shift) const {
        scale = scales.at(group, panel, num_groups, within);
        if (!shifts.numbers) shift = scale * offset;
        else shift = shifts.at(group, panel, num_groups, within) * (are_zeros ? -scale : all(1));
        scale *= factor;
    }
};

// Unpacks a panel to floats [inputs, PANEL].
template <class T>
static void unpack_panel(const uint8_t* weight, const Groups& groups, int64_t inputs, T, float* into) {
    int64_t num_groups = inputs / groups.size, units = groups.size / T::INPUTS;
    for (int64_t group = 0; group < num_groups; group++) {
        vec scale[2], shift[2];
        for (int v = 0; v < 2; v++) groups.read(group, 0, num_groups, v * LANES, FactorOf<T>::VALUE, scale[v], shift[v]);
        for (int64_t unit = 0; unit < units; unit++, weight += T::ROWS * PANEL, into += T::INPUTS * PANEL) {
            __builtin_prefetch(weight + 2048, 0, 3);
#pragma GCC unroll 8
            for (int input = 0; input < T::INPUTS; input++)
#pragma GCC unroll 2
                for (int v = 0; v < 2; v++)
                    store(into + input * PANEL + v * LANES, fused(T::number(weight, v, input), scale[v], shift[v]));
        }
    }
}

// Unpacks one column [inputs] of a matrix in panels to floats.
template <class T>
static void unpack_column(const uint8_t* weight, const Groups& groups, int64_t inputs, int64_t column, T, float* into) {
    int64_t num_groups = inputs / groups.size, vector = column % PANEL / LANES, lane = column % LANES;
    weight += column / PANEL * (inputs / T::INPUTS) * T::ROWS * PANEL;
    Groups own = groups.from(column / PANEL, inputs, vector * LANES);
    for (int64_t group = 0; group < num_groups; group++) {
        vec scale, shift;
        own.read(group, 0, num_groups, 0, FactorOf<T>::VALUE, scale, shift);
        for (int64_t i = 0; i < groups.size; i += T::INPUTS, weight += T::ROWS * PANEL)
            for (int input = 0; input < T::INPUTS; input++) {
                float lanes[LANES];
                store(lanes, fused(T::number(weight, vector, input), scale, shift));
                *into++ = lanes[lane];
            }
    }
}
