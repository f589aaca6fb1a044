// A register of floats as a compiler vector type: 16, 8 or 4 lanes, by architecture. A vector that is wider than a
// register would be kept in memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
constexpr int REGISTERS = 32;
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
constexpr int REGISTERS = 16;
#else
constexpr int64_t LANES = 4;
#if defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
#endif

constexpr int CACHE_LINE = 64;

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint32_t loose_words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint16_t loose_halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

// bfloat16 and float16 in memory.
struct bfloat {
    uint16_t bits;
};
struct half {
    uint16_t bits;
};

// Number format behind an untyped pointer; values are shared with Python.
enum Kind : int64_t { FLOAT, BFLOAT, HALF };

static inline int64_t size_of(int64_t kind) { return kind == FLOAT ? 4 : 2; }

static inline const void* element(const void* from, int64_t index, int64_t kind) {
    return (const char*)from + index * size_of(kind);
}

// Calls `run` with a value of the kind's type; only the type of the value matters.
template <class Run>
static inline void by_kind(int64_t kind, const Run& run) {
    if (kind == FLOAT) run(float{});
    else if (kind == BFLOAT) run(bfloat{});
    else run(half{});
}

static inline vec all(float x) { return x - vec{}; }

// a * b + c, rounded once, by explicit intrinsics, because compilers may fuse one loop and not another, and then a
// row's result would depend on how many rows are computed together.
static inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Native dot products of bfloat16 pairs, accumulated in float32.
#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
static inline vec fused_pairs(vec a, vec b, vec c) {
    return (vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}
#else
constexpr bool HAS_PAIRS = false;
static inline vec fused_pairs(vec, vec, vec c) { return c; }
#endif

static inline vec load(const float* from) { return *(const loose_vec*)from; }

static inline vec load(const bfloat* from) {
    halves bits = *(const loose_halves*)from;
    return (vec)(__builtin_convertvector(bits, words) << 16);
}

// Widens float16. Without native conversion, a multiplication adjusts the exponent, which is correct for subnormal
// numbers too.
static inline vec from_halves(halves narrow) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps((__m256i)narrow);
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps((__m128i)narrow);
#else
    words bits = __builtin_convertvector(narrow, words);
    words wide = (words)((vec)((bits & 0x7fff) << 13) * 0x1p112f);
    wide |= (words)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return (vec)(wide | (bits & 0x8000) << 16);
#endif
}

static inline vec load(const half* from) { return from_halves(*(const loose_halves*)from); }

// Widens int8 to float, by explicit intrinsics, because compilers would widen bytes one by one.
static inline vec load_whole(const int8_t* from) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    bytes some;
    memcpy(&some, from, sizeof(some));
    return __builtin_convertvector(__builtin_convertvector(some, ints), vec);
#endif
}

static inline words load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
    return (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes some;
    memcpy(&some, from, sizeof(some));
    return __builtin_convertvector(some, words);
#endif
}

static inline words load_words(const uint8_t* from) { return *(const loose_words*)from; }

// Stores the lowest byte of each lane.
static inline void store_bytes(int8_t* to, ints whole) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)whole));
#else
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    bytes some = __builtin_convertvector(whole, bytes);
    memcpy(to, &some, sizeof(some));
#endif
}

static inline halves load_short(const uint8_t* from) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes some;
    memcpy(&some, from, sizeof(some));
    return __builtin_convertvector(some, halves);
}

static inline vec as_floats(words whole) { return __builtin_convertvector((ints)whole, vec); }

static inline void store(float* to, vec x) { *(loose_vec*)to = x; }

// Rounds to nearest, ties to even.
static inline void store(bfloat* to, vec x) {
    words bits = (words)x;
    bits += 0x7fff + ((bits >> 16) & 1);
    *(loose_halves*)to = __builtin_convertvector(bits >> 16, halves);
}

static inline void store(half* to, vec x) {
    words bits = (words)x, sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    words normal = (bits - (112 << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    words subnormal = (words)((vec)bits + 0.5f) - 0x3f000000;  // 0.5f's last place is that of subnormal halves
    words out = bits < 0x38800000 ? subnormal : normal;
    out = bits >= 0x477ff000 ? 0x7c00 | ((words)(bits > 0x7f800000) & 0x200) : out;
    *(loose_halves*)to = __builtin_convertvector(out | sign, halves);
}

// Loads the first `count` lanes; the others are 0.
template <class T>
static inline vec load_some(const T* from, int64_t count) {
    T lanes[LANES] = {};
    memcpy(lanes, from, count * sizeof(T));
    return load(lanes);
}

template <class T>
static inline void store_some(T* to, vec x, int64_t count) {
    T lanes[LANES];
    store(lanes, x);
    memcpy(to, lanes, count * sizeof(T));
}

template <class T>
static inline vec load_upto(const T* from, int64_t left) {
    return left >= LANES ? load(from) : load_some(from, left);
}

template <class T>
static inline void store_upto(T* to, vec x, int64_t left) {
    if (left >= LANES) store(to, x);
    else store_some(to, x, left);
}

static inline float sum(vec x) {
    float lanes[LANES];
    store(lanes, x);
    for (int64_t half = LANES / 2; half >= 4; half /= 2)
        for (int64_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

static inline vec larger(vec a, vec b) { return a > b ? a : b; }

static inline float largest(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#endif
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
}

// True if a comparison holds in any lane.
static inline bool any(ints lanes) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#elif defined(__AVX__)
    return _mm256_movemask_ps((__m256)lanes);
#else
    int32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= lanes[lane];
    return found;
#endif
}

// Index of the highest number of a row; ties go to the first. NaN is above all numbers, as in torch.
static int64_t best_of(const float* scores, int64_t count) {
    if (count < LANES) {
        int64_t best = 0;
        for (int64_t i = 1; i < count && scores[best] == scores[best]; i++)
            if (!(scores[i] <= scores[best])) best = i;
        return best;
    }
    // The last register overlaps the previous one; to see a number twice does not change the maximum.
    vec most = load(scores);
    ints odd = most != most;
    for (int64_t i = LANES; i < count; i += LANES) {
        vec some = load(scores + std::min(i, count - LANES));
        odd |= some != some;
        most = larger(some, most);
    }
    bool is_odd = any(odd);
    vec top = all(largest(most));
    for (int64_t i = 0;; i += LANES) {
        int64_t first = std::min(i, count - LANES);
        vec some = load(scores + first);
        ints found = is_odd ? some != some : some == top;
        if (!any(found)) continue;
        for (int64_t lane = 0; lane < LANES; lane++)
            if (found[lane]) return first + lane;
    }
}

// e^x to about one unit in the last place; x below -87 is treated as -87.
static inline vec exponential(vec x) {
    x = x > 88.0f ? all(88.0f) : x;
    x = x < -87.0f ? all(-87.0f) : x;
    vec rounder = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vec shifted = x * 1.44269504f + rounder;
    vec power = shifted - rounder;
    vec rest = x - power * 0.693359375f;
    rest = rest + power * 2.12194440e-4f;
    vec y = all(1.9875691500e-4f);
    y = y * rest + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    ints exponent = ((ints)shifted - (ints)rounder + 127) << 23;
    return y * (vec)exponent;
}

// Logarithm of positive normal numbers, to about one unit in the last place.
static inline vec natural_logarithm(vec x) {
    ints exponent = ((ints)x >> 23) - 126;
    vec mantissa = (vec)(((ints)x & 0x7fffff) | 0x3f000000);  // 0.5 to 1
    ints low = mantissa < 0.707106781f;
    exponent += low;
    mantissa += (vec)(low & (ints)mantissa) - 1.0f;
    vec square = mantissa * mantissa, power = __builtin_convertvector(exponent, vec);
    vec y = all(7.0376836292e-2f);
    y = y * mantissa - 1.1514610310e-1f;
    y = y * mantissa + 1.1676998740e-1f;
    y = y * mantissa - 1.2420140846e-1f;
    y = y * mantissa + 1.4249322787e-1f;
    y = y * mantissa - 1.6668057665e-1f;
    y = y * mantissa + 2.0000714765e-1f;
    y = y * mantissa - 2.4999993993e-1f;
    y = y * mantissa + 3.3333331174e-1f;
    y = y * mantissa * square - power * 2.12194440e-4f - 0.5f * square;
    return mantissa + y + power * 0.693359375f;
}

static inline vec hyperbolic_tangent(vec x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

// x / (1 + e^-x)
static inline vec silu(vec x) { return x / (1.0f + exponential(-x)); }

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
static inline vec gelu_tanh(vec x) {
    return x / (1.0f + exponential(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
}

#if defined(__AVX512F__)
#define LOW_PAIRS 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_PAIRS 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
#define LOW_PAIRS 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_PAIRS 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW_PAIRS 0, 4, 1, 5
#define HIGH_PAIRS 2, 6, 3, 7
#endif

// Transposes rows to columns.
static inline void transpose(vec rows[LANES]) {
    for (int64_t width = 1; width < LANES; width *= 2) {
        vec next[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = __builtin_shufflevector(rows[i], rows[i + LANES / 2], LOW_PAIRS);
            next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + LANES / 2], HIGH_PAIRS);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = next[i];
    }
}
