// Rows rounded to int8. Processors multiply them by integer weights and sum four products in one instruction. Blocks of
// ROUNDED_BLOCK inputs share a scale: the block's largest magnitude divided by 127.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

constexpr int64_t ROUNDED_BLOCK = 32;

// Number of inputs whose integer products are summed before scaling; these inputs share one group and one block.
static inline int64_t step_of(int64_t group) { return group % 32 == 0 ? 32 : group % 16 == 0 ? 16 : 8; }

// Layout of a rounded row, in 32-bit words: one byte per input, then scales by block, then sums of the numbers over
// each 8, 16 and 32 inputs. `sums` is the offset of the sums over `step` inputs.
struct RoundedRows {
    int64_t scales, sums, stride;

    RoundedRows(int64_t inputs, int64_t step) {
        int64_t blocks = (inputs + ROUNDED_BLOCK - 1) / ROUNDED_BLOCK;
        scales = 8 * blocks, stride = 16 * blocks;
        sums = (step == 8 ? 9 : step == 16 ? 13 : 15) * blocks;
    }
};

static inline ints all_whole(int32_t x) { return x - ints{}; }

static inline int32_t sum_of_8(const int8_t* numbers) {
#if defined(__SSE2__)
    __m128i bytes = _mm_xor_si128(_mm_loadl_epi64((const __m128i*)numbers), _mm_set1_epi8(-128));
    return _mm_cvtsi128_si32(_mm_sad_epu8(bytes, _mm_setzero_si128())) - 8 * 128;
#else
    int32_t sum = 0;
    for (int64_t i = 0; i < 8; i++) sum += numbers[i];
    return sum;
#endif
}

// Rounds a row. A number that is not finite makes the scale of its block NaN.
static void round_row(const float* x, int64_t inputs, float* to) {
    RoundedRows by_8(inputs, 8), by_16(inputs, 16), by_32(inputs, 32);
    int8_t* numbers = (int8_t*)to;
    int32_t* words = (int32_t*)to;
    for (int64_t begin = 0; begin < inputs; begin += ROUNDED_BLOCK) {
        vec block[ROUNDED_BLOCK / LANES], most = {};
        ints odd = {};
        for (int64_t i = 0; i < ROUNDED_BLOCK / LANES; i++) {
            int64_t left = inputs - begin - i * LANES;
            block[i] = left > 0 ? load_upto(x + begin + i * LANES, left) : vec{};
            most = larger(most, larger(block[i], -block[i]));
            vec none = block[i] * 0.0f;
            odd |= none != none;
        }
        float top = largest(most);
        to[by_8.scales + begin / ROUNDED_BLOCK] = any(odd) ? NAN : top * (1 / 127.0f);
        float inverse = top > 0 ? 127.0f / top : 0.0f;
        vec rounder = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
        for (int64_t i = 0; i < ROUNDED_BLOCK / LANES; i++) {
            ints whole = (ints)fused(block[i], all(inverse), rounder) - (ints)rounder;
            store_bytes(numbers + begin + i * LANES, whole);
        }
        int32_t of_16 = 0, of_32 = 0;
        for (int64_t first = 0; first < ROUNDED_BLOCK; first += 8) {
            int32_t of_8 = sum_of_8(numbers + begin + first);
            words[by_8.sums + (begin + first) / 8] = of_8;
            of_16 += of_8;
            if (first % 16 == 8) words[by_16.sums + (begin + first) / 16] = of_16, of_32 += of_16, of_16 = 0;
        }
        words[by_32.sums + begin / 32] = of_32;
    }
}

// Offset added to signed weights for instructions that take them as unsigned.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr int SIGNED_EXCESS = 128;
#else
constexpr int SIGNED_EXCESS = 0;
#endif

// Adds to each lane the products of its four weight bytes with the four row bytes in `four`. Unsigned weights are 0 to
// 127; signed weights are taken as `SIGNED_EXCESS` larger.
template <bool SIGNED>
static inline ints dots(ints sum, words weights, int32_t four) {
    if (SIGNED && SIGNED_EXCESS) weights ^= 0x80808080;
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
