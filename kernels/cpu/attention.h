// Attention that reads a paged KV cache in place. Rows and heads that share keys are computed together: KEYS_AT_ONCE
// keys at a time are transposed to columns, against which all of their queries are scored.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "threads.h"
#include "vectors.h"

// MOST_QUERIES: maximum number of queries for which two accumulators per query fit into the registers. Up to
// MOST_GROUPS groups of that many queries share the transposed keys.
constexpr int MOST_QUERIES = REGISTERS == 32 ? 12 : 6, MOST_GROUPS = 4, MOST_OF_TILE = MOST_QUERIES * MOST_GROUPS;
constexpr int64_t KEYS_AT_ONCE = 2 * LANES, KEYS_PER_PASS = 256;
constexpr float HIDDEN = -1e30f;

// Rows of a batch with one shape. Strides are in elements.
struct Segment {
    int64_t start, num_reqs, num_query, num_new;
    const int64_t* tables;  // [num_reqs, width]
    int64_t table_stride, width;
    const int64_t* context;  // [num_reqs]
    const int64_t* positions;  // [num_reqs, num_new]; ignored if causal
    int64_t position_stride;
    const int64_t* mask;  // [num_reqs, num_query, mask_words], or null: causal
    int64_t mask_stride, mask_words;
    // [num_reqs + 1], first row of each request, relative to `start`; null: num_query rows each
    const int64_t* row_starts;
};

struct Heads {
    int64_t num_heads, num_kv_heads, key_dim, value_dim;
    float scale, softcap;  // softcap 0: none
    int64_t window;        // 0: none
    const float* sinks;    // [num_heads], or null
};

// Consecutive rows of one request.
struct Rows {
    const Segment* segment;
    int64_t request, first, count;

    int64_t context() const { return segment->context[request]; }
    int64_t row(int64_t index) const {
        const int64_t* starts = segment->row_starts;
        return segment->start + (starts ? starts[request] : request * segment->num_query) + first + index;
    }
    // 1 + index of the last new row that any of these rows sees.
    int64_t num_new() const {
        if (!segment->mask) return first + count;
        int64_t most = 0;
        for (int64_t i = 0; i < count; i++)
            for (int64_t word = 0; word < segment->mask_words; word++)
                if (uint64_t bits = mask(i)[word])
                    most = std::max<int64_t>(most, word * 64 + 64 - __builtin_clzll(bits));
        return most;
    }
    // Number of leading keys that are context or that all of these rows see.
    int64_t num_shared() const {
        if (!segment->mask) return context() + num_new();
        int64_t least = segment->num_new;
        for (int64_t i = 0; i < count; i++) {
            int64_t leading = 0, word = 0;
            for (; word < segment->mask_words && !~mask(i)[word]; word++) leading += 64;
            if (word < segment->mask_words) leading += __builtin_ctzll(~mask(i)[word]);
            least = std::min(least, leading);
        }
        return context() + least;
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

// scores[query][key] for KEYS_AT_ONCE keys.
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

// results[query][d] += weights[query][key] * values[key][d], for VECTORS * LANES elements of each value from d on.
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

// Transposes keys to columns[d][key]; columns from `count` on are 0. Meanwhile prefetches the `num_next` keys of
// `next`, and `values` (one per key, or null), a line at a time: prefetching all lines at once would exceed the
// processor's outstanding loads.
template <class T>
static void keys_to_columns(const T* const* keys, int64_t count, int64_t dim, float* columns, const T* const* next,
                            int64_t num_next, const T* const* values, int64_t value_dim) {
    auto columns_of = [&](int64_t first, int64_t d, int64_t fetched, int64_t left) __attribute__((always_inline)) {
        vec rows[LANES];
#pragma GCC unroll 16
        for (int64_t key = 0; key < LANES; key++) {
            rows[key] = key < left ? load_upto(keys[first + key] + d, dim - d) : vec{};
            if (d % (CACHE_LINE / (int64_t)sizeof(T)) == 0) {
                if (key < fetched) __builtin_prefetch(next[first + key] + d, 0, 3);
                if (values && key < left && d < value_dim) __builtin_prefetch(values[first + key] + d, 0, 3);
            }
        }
        transpose(rows);
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES; i++) store(columns + (d + i) * KEYS_AT_ONCE + first, rows[i]);
    };
    for (int64_t first = 0; first < KEYS_AT_ONCE; first += LANES)
        for (int64_t d = 0; d < dim; d += LANES) {
            int64_t left = count - first, fetched = num_next - first;
            if (left >= LANES && fetched >= LANES && d + LANES <= dim) columns_of(first, d, LANES, LANES);
            else columns_of(first, d, fetched, left);
        }
}

using Score = void (*)(const float*, const float*, int64_t, float*, int64_t);
using Weigh = void (*)(const float*, int64_t, const float* const*, int64_t, int64_t, float*, int64_t);

struct ByQueries {
    Score score;
    Weigh weigh[2];  // for one vector of values, and for two
};

template <int... LESS_ONE>
static constexpr std::array<ByQueries, MOST_QUERIES + 1> by_queries(std::integer_sequence<int, LESS_ONE...>) {
    return {ByQueries{}, ByQueries{score<LESS_ONE + 1>, {weigh<LESS_ONE + 1, 1>, weigh<LESS_ONE + 1, 2>}}...};
}

static const auto BY_QUERIES = by_queries(std::make_integer_sequence<int, MOST_QUERIES>());

// Returns the value itself if it consists of whole float vectors, else a copy padded with zeros.
static const float* whole_value(const float* value, int64_t dim, float* copy) {
    if (dim % LANES == 0) return value;
    for (int64_t d = 0; d < dim; d += LANES) store(copy + d, load_upto(value + d, dim - d));
    return copy;
}

template <class T>
static const float* whole_value(const T* value, int64_t dim, float* copy) {
    for (int64_t d = 0; d < dim; d += LANES) store(copy + d, load_upto(value + d, dim - d));
    return copy;
}

// Keys that only some rows of a tile see, in path order; these keys follow the keys that all rows see. The sums of a
// tree node therefore have the same order as without a tree, wherever the nodes of its path are stored.
struct OwnKeys {
    std::vector<int64_t> keys;
    int64_t ends[MOST_OF_TILE + 1];  // by row: index of its first key; last element: end of the last row's keys

    void take(const Rows& rows, int64_t shared, int64_t most) {
        keys.clear();
        for (int64_t i = 0; i < rows.count; i++) {
            ends[i] = (int64_t)keys.size();
            for (int64_t key = shared; key < most; key++)
                if (key < rows.context() || rows.sees(i, key, 0)) keys.push_back(key);
        }
        ends[rows.count] = (int64_t)keys.size();
    }
    int64_t count(int64_t row) const { return ends[row + 1] - ends[row]; }
};

// Working memory of a tile: per query, and per pass over its keys.
struct Scratch {
    float *columns, *queries, *own_queries, *results, *scores, *copies;
    float most[MOST_OF_TILE], total[MOST_OF_TILE];

    Scratch(int64_t num_queries, int64_t dim, int64_t wide, bool copied) {
        static thread_local std::vector<float> numbers;
        int64_t columns_size = whole_vectors(dim) * KEYS_AT_ONCE;
        numbers.resize(columns_size + num_queries * (2 * dim + wide + KEYS_PER_PASS) +
                       (copied ? KEYS_PER_PASS * wide : 0));
        columns = numbers.data(), queries = columns + columns_size, own_queries = queries + num_queries * dim;
        results = own_queries + num_queries * dim, scores = results + num_queries * wide;
        copies = scores + num_queries * KEYS_PER_PASS;
        std::fill(results, results + num_queries * wide, 0.0f);
    }
};

// Online softmax: turns `count` scores of a pass into weights, and rescales the earlier sums to the new maximum.
static void soften(float* scores, int64_t count, float& most, float& total, float* results, int64_t wide) {
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    vec best = all(HIDDEN);
    for (int64_t i = 0; i < padded; i += LANES) best = larger(best, load(scores + i));
    float now = std::max(most, largest(best));
    if (now > most && most > HIDDEN) {
        float shrink = exponential(all(most - now))[0];
        total *= shrink;
        for (int64_t d = 0; d < wide; d += LANES) store(results + d, load(results + d) * shrink);
    }
    most = now;
    vec added = {};
    for (int64_t i = 0; i < padded; i += LANES) {
        vec logits = load(scores + i);
        vec weights = logits > HIDDEN ? exponential(logits - now) : vec{};
        added += weights;
        store(scores + i, weights);
    }
    total += sum(added);
}

// Attends from `rows` to their keys in passes, for `num_heads` query heads from `head` on; rows are grouped by
// `rows_at_once`.
template <class T>
static void attend_queries(const Heads& heads, const Rows& rows, int64_t rows_at_once, int64_t head, int64_t num_heads,
                           const float* query, int64_t query_stride, const T* key_cache, const T* value_cache, int64_t block_size,
                           float* out, int64_t out_stride) {
    const int64_t num_queries = rows.count * num_heads, dim = heads.key_dim;
    const int64_t value_dim = heads.value_dim, wide = whole_vectors(value_dim);
    const int64_t kv_head = head / (heads.num_heads / heads.num_kv_heads);
    Scratch at(num_queries, dim, wide, sizeof(T) < sizeof(float) || value_dim % LANES);
    const int64_t group_queries = rows_at_once * num_heads;
    for (int q = 0; q < num_queries; q++) {
        const float* from = query + rows.row(q / num_heads) * query_stride + (head + q % num_heads) * dim;
        float* own = at.own_queries + q / num_heads * num_heads * dim + q % num_heads;
        int64_t first = q / group_queries * group_queries, width = std::min(group_queries, num_queries - first);
        float* group = at.queries + first * dim + q - first;
        for (int64_t d = 0; d < dim; d++) group[d * width] = own[d * num_heads] = from[d] * heads.scale;
        at.most[q] = heads.sinks ? heads.sinks[head + q % num_heads] : HIDDEN;
        at.total[q] = heads.sinks ? 1.0f : 0.0f;
    }
    const int64_t* table = rows.segment->tables + rows.request * rows.segment->table_stride;
    int64_t context = rows.context();
    int64_t num_keys = std::min(context + rows.num_new(), rows.segment->width * block_size), shared = num_keys;
    static thread_local OwnKeys own_keys;
    int64_t most_own = 0;
    if (rows.segment->mask) {
        shared = std::min(rows.num_shared(), num_keys);
        if (shared < num_keys) shared = std::max<int64_t>(shared / KEYS_AT_ONCE * KEYS_AT_ONCE, 0);
        own_keys.take(rows, shared, num_keys);
        for (int64_t i = 0; i < rows.count; i++) most_own = std::max(most_own, own_keys.count(i));
    }
    int64_t begin = 0;
    if (heads.window) {
        int64_t lowest = rows.position(0);
        for (int64_t i = 1; i < rows.count; i++) lowest = std::min(lowest, rows.position(i));
        begin = std::clamp<int64_t>(lowest - heads.window + 1, 0, std::max<int64_t>(context, 0)) / KEYS_AT_ONCE * KEYS_AT_ONCE;
    }
    const T *keys[KEYS_AT_ONCE], *next[KEYS_AT_ONCE], *fetched[KEYS_AT_ONCE];
    int64_t num_next = 0;
    const float* values[KEYS_PER_PASS];
    int64_t places[KEYS_PER_PASS];  // cache offsets of a pass's keys, in heads
    auto place = [&](int64_t key) {
        return (table[key / block_size] * block_size + key % block_size) * heads.num_kv_heads + kv_head;
    };
    // Block by block, because a division per key would take as long as the key's dot products.
    auto place_pass = [&](int64_t first, int64_t count) {
        for (int64_t index = 0; index < count;) {
            int64_t left = std::min(count - index, block_size - (first + index) % block_size);
            int64_t at_block = place(first + index);
            for (int64_t i = 0; i < left; i++) places[index + i] = at_block + i * heads.num_kv_heads;
            index += left;
        }
    };
    auto take_value = [&](int64_t index) {
        values[index] = whole_value(value_cache + places[index] * value_dim, value_dim, at.copies + index * wide);
    };
    // Scores `some` keys at `index` of their pass, for `num_rows` rows from `row` on, whose queries are at `from`.
    auto score_keys = [&](auto key_of, int64_t some, int64_t index, int64_t row, int64_t num_rows, const float* from,
                          const T* const* values_of) {
        for (int64_t i = 0; i < some; i++) keys[i] = key_cache + places[index + i] * dim;
        keys_to_columns(keys, some, dim, at.columns, next, num_next, values_of, value_dim);
        float* scores = at.scores + row * num_heads * KEYS_PER_PASS + index;
        for (int64_t q = 0; q < num_rows * num_heads; q += group_queries)
            BY_QUERIES[std::min(group_queries, num_rows * num_heads - q)].score(
                from + q * dim, at.columns, dim, scores + q * KEYS_PER_PASS, KEYS_PER_PASS);
        if (heads.softcap > 0)
            for (int64_t q = 0; q < num_rows * num_heads; q++)
                for (int64_t i = 0; i < KEYS_AT_ONCE; i += LANES) {
                    float* some_scores = scores + q * KEYS_PER_PASS + i;
                    store(some_scores, heads.softcap * hyperbolic_tangent(load(some_scores) / heads.softcap));
                }
        if (some == KEYS_AT_ONCE && key_of(some - 1) < context && !heads.window) return;
        for (int64_t r = 0; r < num_rows; r++)
            for (int64_t i = 0; i < KEYS_AT_ONCE; i++)
                if (i >= some || !rows.sees(row + r, key_of(i), heads.window))
                    for (int64_t h = 0; h < num_heads; h++) scores[(r * num_heads + h) * KEYS_PER_PASS + i] = HIDDEN;
    };
    // Weighs keys [first, first + count) of a pass, for `num` queries from `q` on.
    auto weigh_values = [&](int64_t first, int64_t count, int64_t q, int64_t num) {
        for (int64_t d = 0; count > 0 && d < value_dim; d += 2 * LANES)
            BY_QUERIES[num].weigh[d + LANES < value_dim](at.scores + q * KEYS_PER_PASS + first, KEYS_PER_PASS,
                                                         values + first, count, d, at.results + q * wide, wide);
    };
    // Passes end at multiples of KEYS_PER_PASS, so that a row's passes do not depend on the rows beside it.
    for (int64_t start = begin, end; start < shared + most_own; start = end) {
        end = std::min((start / KEYS_PER_PASS + 1) * KEYS_PER_PASS, shared + most_own);
        int64_t num_shared = std::clamp<int64_t>(shared - start, 0, end - start), skipped = start + num_shared - shared;
        place_pass(start, num_shared);
        for (int64_t index = 0; index < num_shared; index += KEYS_AT_ONCE) {
            int64_t some = std::min(KEYS_AT_ONCE, num_shared - index);
            num_next = std::min(KEYS_AT_ONCE, num_shared - index - some);
            for (int64_t i = 0; i < num_next; i++) next[i] = key_cache + places[index + some + i] * dim;
            for (int64_t i = 0; i < some; i++) fetched[i] = value_cache + places[index + i] * value_dim;
            score_keys([&](int64_t i) { return start + index + i; }, some, index, 0, rows.count, at.queries, fetched);
            for (int64_t i = 0; i < some; i++) take_value(index + i);
        }
        int64_t counts[MOST_OF_TILE];
        for (int64_t i = 0; i < rows.count; i++) {
            int64_t own = most_own ? std::clamp<int64_t>(own_keys.count(i) - skipped, 0, end - start - num_shared) : 0;
            const int64_t* its = own_keys.keys.data() + (own ? own_keys.ends[i] + skipped : 0);
            for (int64_t k = 0; k < own; k++) places[num_shared + k] = place(its[k]);
            for (int64_t index = 0; index < own; index += KEYS_AT_ONCE)
                score_keys([&](int64_t k) { return its[index + k]; }, std::min(KEYS_AT_ONCE, own - index),
                           num_shared + index, i, 1, at.own_queries + i * num_heads * dim, nullptr);
            counts[i] = num_shared + own;
        }
        for (int q = 0; q < num_queries; q++)
            soften(at.scores + q * KEYS_PER_PASS, counts[q / num_heads], at.most[q], at.total[q],
                   at.results + q * wide, wide);
        for (int64_t q = 0; q < num_queries; q += group_queries)
            weigh_values(0, num_shared, q, std::min(group_queries, num_queries - q));
        for (int64_t i = 0; i < rows.count; i++) {
            const int64_t* its = own_keys.keys.data() + (counts[i] > num_shared ? own_keys.ends[i] + skipped : 0);
            for (int64_t k = num_shared; k < counts[i]; k++) {
                places[k] = place(its[k - num_shared]);
                take_value(k);
            }
            weigh_values(num_shared, counts[i] - num_shared, i * num_heads, num_heads);
        }
    }
    for (int q = 0; q < num_queries; q++) {
        float* to = out + rows.row(q / num_heads) * out_stride + (head + q % num_heads) * value_dim;
        // A padding row may see no key: its keys lie past the table, or its window begins after all stored keys.
        float all_weights = at.total[q] > 0 ? at.total[q] : 1;
        for (int64_t d = 0; d < value_dim; d += LANES)
            store_upto(to + d, load(at.results + q * wide + d) / all_weights, value_dim - d);
    }
}

// out [num_rows, num_heads * value_dim] for queries [num_rows, num_heads * key_dim], whose own keys and values are
// stored.
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
    // Up to MOST_GROUPS groups of rows of one request share a tile, as long as every thread still gets a tile.
    auto count_of = [](const Segment& segment, int64_t request) {
        const int64_t* starts = segment.row_starts;
        return starts ? starts[request + 1] - starts[request] : segment.num_query;
    };
    int64_t num_groups = 0;
    for (int64_t s = 0; s < num_segments; s++)
        for (int64_t request = 0; request < segments[s].num_reqs; request++)
            num_groups += (count_of(segments[s], request) + rows_at_once - 1) / rows_at_once;
    int64_t per_thread = num_groups * heads.num_kv_heads * parts / threads.count();
    int64_t rows_of_tile = rows_at_once * std::clamp<int64_t>(per_thread, 1, MOST_GROUPS);
    for (int64_t s = 0; s < num_segments; s++) {
        const Segment& segment = segments[s];
        for (int64_t request = 0; request < segment.num_reqs; request++) {
            int64_t count = count_of(segment, request);
            for (int64_t first = 0; first < count; first += rows_of_tile)
                tiles.push_back({&segment, request, first, std::min(rows_of_tile, count - first)});
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
            attend_queries(heads, rows, rows_at_once, part / parts * group + first, num_heads, query, query_stride, key_cache,
                           value_cache, block_size, out, out_stride);
        }
    });
}
