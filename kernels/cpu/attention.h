// Attention over a paged KV cache that is read where it lies. Rows and heads that share keys are done together: two
// vectors of keys at a time are turned into columns, which all of their queries meet.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "threads.h"
#include "vectors.h"

// Two vectors of each fit into the registers.
constexpr int MOST_QUERIES = REGISTERS == 32 ? 12 : 6;
constexpr int64_t KEYS_AT_ONCE = 2 * LANES, KEYS_PER_PASS = 256;
constexpr float HIDDEN = -1e30f;

// Rows of a batch that share a shape; strides are in elements.
struct Segment {
    int64_t start, num_reqs, num_query, num_new;
    const int64_t* tables;  // [num_reqs, width]
    int64_t table_stride, width;
    const int64_t* context;  // [num_reqs]
    const int64_t* positions;  // [num_reqs, num_new]; not read where causal
    int64_t position_stride;
    const int64_t* mask;  // [num_reqs, num_query, mask_words], or null: causal
    int64_t mask_stride, mask_words;
    const int64_t* row_starts;  // [num_reqs + 1], rows of each request behind `start`; null: num_query each
};

struct Heads {
    int64_t num_heads, num_kv_heads, key_dim, value_dim;
    float scale, softcap;  // softcap 0: none
    int64_t window;        // 0: none
    const float* sinks;    // [num_heads], or null
};

// Some rows of one request.
struct Rows {
    const Segment* segment;
    int64_t request, first, count;

    int64_t context() const { return segment->context[request]; }
    int64_t row(int64_t index) const {
        const int64_t* starts = segment->row_starts;
        return segment->start + (starts ? starts[request] : request * segment->num_query) + first + index;
    }
    // New rows up to the last that any of these may see.
    int64_t num_new() const {
        if (!segment->mask) return first + count;
        int64_t most = 0;
        for (int64_t i = 0; i < count; i++)
            for (int64_t word = 0; word < segment->mask_words; word++)
                if (uint64_t bits = mask(i)[word])
                    most = std::max<int64_t>(most, word * 64 + 64 - __builtin_clzll(bits));
        return most;
    }
    const int64_t* mask(int64_t index) const {
        return segment->mask + request * segment->mask_stride + (first + index) * segment->mask_words;
    }
    const int64_t* positions() const { return segment->positions + request * segment->position_stride; }
    int64_t position(int64_t index) const {
        if (!segment->mask) return context() + first + index;
        return positions()[segment->num_new - segment->num_query + first + index];
    }
    bool sees(int64_t index, int64_t key, int64_t window) const {
        int64_t ahead = key - context(), at = key;
        if (ahead >= 0) {
            if (!segment->mask) {
                if (ahead > first + index) return false;
            } else {
                if (!(mask(index)[ahead / 64] >> (ahead % 64) & 1)) return false;
                at = positions()[ahead];
            }
        }
        return !window || position(index) - at < window;
    }
};

// scores[query][key] of KEYS_AT_ONCE keys.
template <int QUERIES>
__attribute__((noinline)) static void score(const float* queries, const float* keys, int64_t dim, float* scores, int64_t stride) {
    vec low[QUERIES] = {}, high[QUERIES] = {};
    for (int64_t d = 0; d < dim; d++) {
        vec a = load(keys + d * KEYS_AT_ONCE), b = load(keys + d * KEYS_AT_ONCE + LANES);
#pragma GCC unroll 16
        for (int q = 0; q < QUERIES; q++) {
            vec scale = all(queries[d * QUERIES + q]);
            low[q] = fused(scale, a, low[q]);
            high[q] = fused(scale, b, high[q]);
        }
    }
#pragma GCC unroll 16
    for (int q = 0; q < QUERIES; q++) {
        store(scores + q * stride, low[q]);
        store(scores + q * stride + LANES, high[q]);
    }
}

// results[query][d] += weights[query][key] * values[key][d] for VECTORS * LANES numbers of each value.
template <int QUERIES, int VECTORS>
__attribute__((noinline)) static void weigh(const float* weights, int64_t stride, const float* const* values,
                                            int64_t num_keys, int64_t d, float* results, int64_t dim) {
    vec kept[QUERIES][VECTORS];
#pragma GCC unroll 16
    for (int q = 0; q < QUERIES; q++)
        for (int v = 0; v < VECTORS; v++) kept[q][v] = load(results + q * dim + d + v * LANES);
    for (int64_t key = 0; key < num_keys; key++) {
        vec value[VECTORS];
        for (int v = 0; v < VECTORS; v++) value[v] = load(values[key] + d + v * LANES);
#pragma GCC unroll 16
        for (int q = 0; q < QUERIES; q++) {
            vec weight = all(weights[q * stride + key]);
            for (int v = 0; v < VECTORS; v++) kept[q][v] = fused(weight, value[v], kept[q][v]);
        }
    }
#pragma GCC unroll 16
    for (int q = 0; q < QUERIES; q++)
        for (int v = 0; v < VECTORS; v++) store(results + q * dim + d + v * LANES, kept[q][v]);
}

static int64_t whole_vectors(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }

// Keys as columns: columns[d][key]; keys from `count` on are 0.
template <class T>
static void keys_to_columns(const T* const* keys, int64_t count, int64_t dim, float* columns) {
    for (int64_t half = 0; half < 2; half++) {
        for (int64_t d = 0; d < dim; d += LANES) {
            vec rows[LANES];
            for (int64_t key = 0; key < LANES; key++) {
                int64_t index = half * LANES + key;
                rows[key] = index < count ? load_upto(keys[index] + d, dim - d) : vec{};
            }
            transpose(rows);
            for (int64_t i = 0; i < LANES; i++) store(columns + (d + i) * KEYS_AT_ONCE + half * LANES, rows[i]);
        }
    }
}

using Score = void (*)(const float*, const float*, int64_t, float*, int64_t);
using Weigh = void (*)(const float*, int64_t, const float* const*, int64_t, int64_t, float*, int64_t);

struct ByQueries {
    Score score;
    Weigh weigh[2];  // one vector of values, two
};

template <int... LESS_ONE>
static constexpr std::array<ByQueries, MOST_QUERIES + 1> by_queries(std::integer_sequence<int, LESS_ONE...>) {
    return {ByQueries{}, ByQueries{score<LESS_ONE + 1>, {weigh<LESS_ONE + 1, 1>, weigh<LESS_ONE + 1, 2>}}...};
}

static const auto BY_QUERIES = by_queries(std::make_integer_sequence<int, MOST_QUERIES>());

// The value itself, or a copy of whole vectors where it is not one of those.
static const float* whole_value(const float* value, int64_t dim, float* copy) {
    if (dim % LANES == 0) return value;
    for (int64_t d = 0; d < dim; d += LANES) store(copy + d, load_upto(value + d, dim - d));
    return copy;
}

static const float* whole_value(const bfloat* value, int64_t dim, float* copy) {
    for (int64_t d = 0; d < dim; d += LANES) store(copy + d, load_upto(value + d, dim - d));
    return copy;
}

// One pass over the keys of `rows` for their queries of `num_heads` heads from `head` on.
template <class T>
static void attend_queries(const Heads& heads, const Rows& rows, int64_t head, int64_t num_heads, const float* query,
                           int64_t query_stride, const T* key_cache, const T* value_cache, int64_t block_size,
                           float* out, int64_t out_stride) {
    const int64_t num_queries = rows.count * num_heads, dim = heads.key_dim;
    const int64_t value_dim = heads.value_dim, wide = whole_vectors(value_dim);
    const int64_t kv_head = head / (heads.num_heads / heads.num_kv_heads);
    static thread_local std::vector<float> scratch;
    int64_t columns_size = whole_vectors(dim) * KEYS_AT_ONCE;
    bool copied = sizeof(T) < sizeof(float) || value_dim % LANES;
    scratch.resize(columns_size + num_queries * (dim + wide + KEYS_PER_PASS) + (copied ? KEYS_PER_PASS * wide : 0));
    float *columns = scratch.data(), *queries = columns + columns_size, *results = queries + num_queries * dim;
    float *scores = results + num_queries * wide, *copies = scores + num_queries * KEYS_PER_PASS;
    float most[MOST_QUERIES], total[MOST_QUERIES];
    for (int q = 0; q < num_queries; q++) {
        const float* from = query + rows.row(q / num_heads) * query_stride + (head + q % num_heads) * dim;
        for (int64_t d = 0; d < dim; d++) queries[d * num_queries + q] = from[d] * heads.scale;
        most[q] = heads.sinks ? heads.sinks[head + q % num_heads] : HIDDEN;
        total[q] = heads.sinks ? 1.0f : 0.0f;
    }
    std::fill(results, results + num_queries * wide, 0.0f);
    const int64_t* table = rows.segment->tables + rows.request * rows.segment->table_stride;
    int64_t context = rows.context();
    int64_t num_keys = std::min(context + rows.num_new(), rows.segment->width * block_size);
    int64_t begin = 0;
    if (heads.window) {
        int64_t lowest = rows.position(0);
        for (int64_t i = 1; i < rows.count; i++) lowest = std::min(lowest, rows.position(i));
        begin = std::clamp<int64_t>((lowest - heads.window + 1) / KEYS_AT_ONCE * KEYS_AT_ONCE, 0, context);
    }
    const T* keys[KEYS_AT_ONCE];
    const float* values[KEYS_PER_PASS];
    for (int64_t start = begin; start < num_keys; start += KEYS_PER_PASS) {
        int64_t count = std::min(KEYS_PER_PASS, num_keys - start);
        for (int64_t at = 0; at < count; at += KEYS_AT_ONCE) {
            int64_t some = std::min(KEYS_AT_ONCE, count - at);
            for (int64_t i = 0; i < some; i++) {
                int64_t key = start + at + i;
                int64_t place = (table[key / block_size] * block_size + key % block_size) * heads.num_kv_heads + kv_head;
                keys[i] = key_cache + place * dim;
                values[at + i] = whole_value(value_cache + place * value_dim, value_dim, copies + (at + i) * wide);
            }
            keys_to_columns(keys, some, dim, columns);
            BY_QUERIES[num_queries].score(queries, columns, dim, scores + at, KEYS_PER_PASS);
            if (heads.softcap > 0)
                for (int q = 0; q < num_queries; q++)
                    for (int64_t i = 0; i < KEYS_AT_ONCE; i += LANES) {
                        float* place = scores + q * KEYS_PER_PASS + at + i;
                        store(place, heads.softcap * hyperbolic_tangent(load(place) / heads.softcap));
                    }
            int64_t end = start + at + KEYS_AT_ONCE;
            if (end <= context && !heads.window) continue;
            for (int64_t i = 0; i < rows.count; i++)
                for (int64_t key = start + at; key < end; key++)
                    if (key >= num_keys || !rows.sees(i, key, heads.window))
                        for (int64_t h = 0; h < num_heads; h++)
                            scores[(i * num_heads + h) * KEYS_PER_PASS + key - start] = HIDDEN;
        }
        int64_t padded = (count + LANES - 1) / LANES * LANES;
        for (int q = 0; q < num_queries; q++) {
            float* own = scores + q * KEYS_PER_PASS;
            vec best = all(HIDDEN);
            for (int64_t i = 0; i < padded; i += LANES) best = larger(best, load(own + i));
            float now = std::max(most[q], largest(best));
            if (now > most[q] && most[q] > HIDDEN) {
                float shrink = exponential(all(most[q] - now))[0];
                total[q] *= shrink;
                for (int64_t d = 0; d < wide; d += LANES)
                    store(results + q * wide + d, load(results + q * wide + d) * shrink);
            }
            most[q] = now;
            vec added = {};
            for (int64_t i = 0; i < padded; i += LANES) {
                vec logits = load(own + i);
                vec weights = logits > HIDDEN ? exponential(logits - now) : vec{};
                added += weights;
                store(own + i, weights);
            }
            total[q] += sum(added);
        }
        int64_t d = 0;
        for (; d < value_dim; d += 2 * LANES)
            BY_QUERIES[num_queries].weigh[d + LANES < value_dim](scores, KEYS_PER_PASS, values, count, d, results, wide);
    }
    for (int q = 0; q < num_queries; q++) {
        float* to = out + rows.row(q / num_heads) * out_stride + (head + q % num_heads) * value_dim;
        for (int64_t d = 0; d < value_dim; d += LANES)
            store_upto(to + d, load(results + q * wide + d) / total[q], value_dim - d);
    }
}

// out [num_rows, num_heads * value_dim] of queries [num_rows, num_heads * key_dim], whose keys and values are stored.
template <class T>
static void attend(const Heads& heads, const Segment* segments, int64_t num_segments, const float* query,
                   int64_t query_stride, const T* key_cache, const T* value_cache, int64_t block_size, float* out,
                   int64_t out_stride) {
    int64_t group = heads.num_heads / heads.num_kv_heads;
    int64_t heads_at_once = group, parts = (group + MOST_QUERIES - 1) / MOST_QUERIES;
    heads_at_once = (group + parts - 1) / parts;
    int64_t rows_at_once = std::max<int64_t>(MOST_QUERIES / heads_at_once, 1);
    static thread_local std::vector<Rows> tiles;
    tiles.clear();
    for (int64_t s = 0; s < num_segments; s++) {
        const Segment& segment = segments[s];
        for (int64_t request = 0; request < segment.num_reqs; request++) {
            const int64_t* starts = segment.row_starts;
            int64_t count = starts ? starts[request + 1] - starts[request] : segment.num_query;
            for (int64_t first = 0; first < count; first += rows_at_once)
                tiles.push_back({&segment, request, first, std::min(rows_at_once, count - first)});
        }
    }
    int64_t per_rows = heads.num_kv_heads * parts, num_tiles = (int64_t)tiles.size() * per_rows;
    const Rows* all_rows = tiles.data();
    int64_t at_once = (num_tiles + 65534) / 65535;
    threads.share((num_tiles + at_once - 1) / at_once, [=, &heads](int64_t index) {
        for (int64_t tile = index * at_once; tile < std::min((index + 1) * at_once, num_tiles); tile++) {
            const Rows& rows = all_rows[tile / per_rows];
            int64_t part = tile % per_rows, first = part % parts * heads_at_once;
            int64_t num_heads = std::min(heads_at_once, group - first);
            if (num_heads <= 0) continue;
            attend_queries(heads, rows, part / parts * group + first, num_heads, query, query_stride, key_cache,
                           value_cache, block_size, out, out_stride);
        }
    });
}
