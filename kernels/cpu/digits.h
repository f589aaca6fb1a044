// Rows as whole numbers of int8 digits, because processors multiply int8 by integer weights and sum four products in one
// instruction. Blocks of DIGIT_BLOCK inputs share a scale. With one digit, a row is rounded to int8: the scale is the
// block's largest magnitude divided by 127. With EXACT_DIGITS digits of base 256, a number changes by at most 2^-23 of
// the block's largest. The sums of the digits' products are exact, so these products are faster and, for many inputs,
// more exact than float32's, whose rounding errors add up.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

constexpr int64_t DIGIT_BLOCK = 32;

// Fewest inputs of rows that are split into EXACT_DIGITS digits; with fewer inputs a float32 product is more exact.
constexpr int64_t LEAST_SPLIT = 512;
// Number of digits of rows that are not rounded; 0 if float32 products are faster.
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
constexpr int EXACT_DIGITS = 3;
#else
constexpr int EXACT_DIGITS = 0;
#endif

// Number of inputs whose integer products are summed before scaling; these inputs share one group and one block.
static inline int64_t step_of(int64_t group) { return group % 32 == 0 ? 32 : group % 16 == 0 ? 16 : 8; }

// Offset added to signed weights for instructions that take them as unsigned.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr int SIGNED_EXCESS = 128;
#else
constexpr int SIGNED_EXCESS = 0;
#endif

// Layout of a row, in 32-bit words: for each step, the digits of four inputs, the highest first, then those of the next
// four; the scale; the sum of the step's numbers, without the scale, as a float; and for each digit its sum times
// -SIGNED_EXCESS.
struct DigitRows {
    int64_t scale, sum, excess, step, stride;

    constexpr DigitRows(int64_t inputs, int64_t by, int64_t digits)
        : scale(digits * by / 4), sum(scale + 1), excess(sum + 1), step(excess + digits), stride(step * (inputs / by)) {}
};

static inline ints all_whole(int32_t x) { return x - ints{}; }

// DIGIT_BLOCK numbers of a row, or as many as are left and zeros.
struct RowBlock {
    static constexpr int64_t VECTORS = DIGIT_BLOCK / LANES;
    vec numbers[VECTORS];
    float top;  // largest magnitude
    bool is_odd;  // a number is not finite

    RowBlock(const float* x, int64_t left) {
        vec most = {};
        ints odd = {};
        for (int64_t i = 0; i < VECTORS; i++, left -= LANES) {
            numbers[i] = left > 0 ? load_upto(x + i * LANES, left) : vec{};
            most = larger(most, larger(numbers[i], -numbers[i]));
            vec none = numbers[i] * 0.0f;
            odd |= none != none;
        }
        top = largest(most), is_odd = any(odd);
    }
};

// Sum of 8, 16 or 32 numbers.
static inline int32_t sum_of(const int8_t* numbers, int64_t count) {
    int32_t sum = 0;
#if defined(__SSE2__)
    for (int64_t i = 0; i < count; i += 8) {
        __m128i bytes = _mm_xor_si128(_mm_loadl_epi64((const __m128i*)(numbers + i)), _mm_set1_epi8(-128));
        sum += _mm_cvtsi128_si32(_mm_sad_epu8(bytes, _mm_setzero_si128())) - 8 * 128;
    }
#else
    for (int64_t i = 0; i < count; i++) sum += numbers[i];
#endif
    return sum;
}

// Rounds a row to int8. A number that is not finite makes the scale of its block NaN.
static void round_row(const float* x, int64_t inputs, int64_t step, float* to) {
    DigitRows rows(inputs, step, 1);
    for (int64_t begin = 0; begin < inputs; begin += DIGIT_BLOCK) {
        RowBlock block(x + begin, inputs - begin);
        float inverse = block.top > 0 ? 127.0f / block.top : 0.0f;
        int8_t numbers[DIGIT_BLOCK];
        vec rounder = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
        for (int64_t i = 0; i < RowBlock::VECTORS; i++) {
            ints whole = (ints)fused(block.numbers[i], all(inverse), rounder) - (ints)rounder;
            store_bytes(numbers + i * LANES, whole);
        }
        for (int64_t first = 0; first < DIGIT_BLOCK && begin + first < inputs; first += step, to += rows.step) {
            int32_t sum = sum_of(numbers + first, step), excess = -SIGNED_EXCESS * sum;
            memcpy(to, numbers + first, step);
            memcpy(to + rows.excess, &excess, sizeof(excess));
            to[rows.scale] = block.is_odd ? NAN : block.top * (1 / 127.0f);
            to[rows.sum] = (float)sum;
        }
    }
}

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
// Smallest power of two, but at least 2^-126, whose multiple 0x7f7f7f, the largest number of three int8 digits, is at
// least `top` rounded to a multiple.
static inline float split_scale(float top) {
    uint32_t bits;
    memcpy(&bits, &top, sizeof(bits));
    uint32_t exponent = std::max((bits >> 23) + ((bits & 0x7fffff) >= 0x7efeff), 23u);
    bits = (exponent - 22) << 23;
    memcpy(&top, &bits, sizeof(top));
    return top;
}

// Splits a row into three digits. A number that is not finite makes the scale of its block NaN.
static void split_row(const float* x, int64_t inputs, int64_t step, float* to) {
    DigitRows rows(inputs, step, 3);
    const __m512i middle = _mm512_set1_epi32(0x808080), ones = _mm512_set1_epi8(1);
    // From four numbers of three bytes each to the four highest bytes, the four middle ones and the four lowest.
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, 3, 3, 3, 3));
    for (int64_t begin = 0; begin < inputs; begin += DIGIT_BLOCK) {
        RowBlock block(x + begin, inputs - begin);
        float scale = split_scale(block.top), inverse = 1 / scale;
        alignas(CACHE_LINE) int32_t digits[DIGIT_BLOCK], sums[DIGIT_BLOCK];
        for (int64_t i = 0; i < RowBlock::VECTORS; i++) {
            __m512i whole = _mm512_cvtps_epi32((__m512)(block.numbers[i] * inverse));
            whole = _mm512_xor_si512(_mm512_add_epi32(whole, middle), middle);  // its bytes are digits now
            whole = _mm512_shuffle_epi8(whole, order);
            _mm512_store_si512(digits + i * LANES, whole);
            _mm512_store_si512(sums + i * LANES, _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, whole));
        }
        for (int64_t first = 0; first < DIGIT_BLOCK && begin + first < inputs; first += step, to += rows.step) {
            __m128i sum = _mm_setzero_si128();
            for (int64_t i = 0; i < step; i += 4) {
                // The fourth word is overwritten by what follows.
                _mm_storeu_si128((__m128i*)(to + i / 4 * 3), _mm_load_si128((const __m128i*)(digits + first + i)));
                sum = _mm_add_epi32(sum, _mm_load_si128((const __m128i*)(sums + first + i)));
            }
            alignas(16) int32_t of_digits[4];
            _mm_store_si128((__m128i*)of_digits, sum);
            to[rows.scale] = block.is_odd ? NAN : scale;
            to[rows.sum] = (float)(of_digits[0] * 65536 + of_digits[1] * 256 + of_digits[2]);
            for (int digit = 0; digit < 3; digit++) {
                int32_t excess = -SIGNED_EXCESS * of_digits[digit];
                memcpy(to + rows.excess + digit, &excess, sizeof(excess));
            }
        }
    }
}
#else
// Not called, because no matrix has rows of EXACT_DIGITS digits.
static void split_row(const float*, int64_t, int64_t, float*) { __builtin_trap(); }
#endif

// Adds to each lane the products of its four weight bytes with the four row bytes in `four`. Without SIGNED_EXCESS,
// unsigned weights are below 128.
template <bool SIGNED>
static inline ints dots(ints sum, words weights, int32_t four) {
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(four));
#elif defined(__AVX512F__) && defined(__AVX512BW__)
    __m512i rows = _mm512_set1_epi32(four), bytes = (__m512i)weights;
    if (SIGNED) {
        rows = _mm512_mask_sub_epi8(rows, _mm512_movepi8_mask(bytes), _mm512_setzero_si512(), rows);
        bytes = _mm512_abs_epi8(bytes);
    }
    return sum + (ints)_mm512_madd_epi16(_mm512_maddubs_epi16(bytes, rows), _mm512_set1_epi16(1));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(four));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    __m256i rows = _mm256_set1_epi32(four), bytes = (__m256i)weights;
    if (SIGNED) rows = _mm256_sign_epi8(rows, bytes), bytes = _mm256_abs_epi8(bytes);
    return sum + (ints)_mm256_madd_epi16(_mm256_maddubs_epi16(bytes, rows), _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, vreinterpretq_s8_s32(vdupq_n_s32(four)));
#else
    for (int byte = 0; byte < 4; byte++) {
        ints weight = SIGNED ? (ints)(weights << (24 - 8 * byte)) >> 24 : (ints)(weights >> 8 * byte & 255);
        sum += weight * (int32_t)(int8_t)(four >> 8 * byte);
    }
    return sum;
#endif
}
