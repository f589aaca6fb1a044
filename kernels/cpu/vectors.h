// Sixteen floats at once, in the compiler's own vector types: what the machine lacks, the compiler makes of less.
#pragma once

#include <cstdint>
#include <cstring>

typedef float vec __attribute__((vector_size(64)));
typedef float loose_vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));
typedef uint16_t loose_halves __attribute__((vector_size(32), aligned(2), may_alias));

constexpr int64_t LANES = 16;

// bfloat16 as it lies in memory.
struct bfloat {
    uint16_t bits;
};

static inline vec all(float x) { return vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

static inline vec load(const float* from) { return *(const loose_vec*)from; }

static inline vec load(const bfloat* from) {
    halves bits = *(const loose_halves*)from;
    return (vec)(__builtin_convertvector(bits, words) << 16);
}

static inline void store(float* to, vec x) { *(loose_vec*)to = x; }

// To the nearest, ties to even.
static inline void store(bfloat* to, vec x) {
    words bits = (words)x;
    bits += 0x7fff + ((bits >> 16) & 1);
    *(loose_halves*)to = __builtin_convertvector(bits >> 16, halves);
}

// The first `count` lanes, the others 0.
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
    vec a = x + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    vec b = a + __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    return (b[0] + b[1]) + (b[2] + b[3]);
}

static inline vec larger(vec a, vec b) { return a > b ? a : b; }

static inline float largest(vec x) {
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
}

// e^x to about one unit in the last place; x below -87 gives the smallest normal number.
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

static inline vec hyperbolic_tangent(vec x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

// x / (1 + e^-x)
static inline vec silu(vec x) { return x / (1.0f + exponential(-x)); }

static inline vec low_pairs(vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

static inline vec high_pairs(vec a, vec b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Rows become columns.
static inline void transpose(vec rows[16]) {
    for (int round = 0; round < 4; round++) {
        vec next[16];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            next[2 * i] = low_pairs(rows[i], rows[i + 8]);
            next[2 * i + 1] = high_pairs(rows[i], rows[i + 8]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) rows[i] = next[i];
    }
}
