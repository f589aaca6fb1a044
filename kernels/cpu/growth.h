// State shared by all kinds of draft heads: sequences by slot, their decided tokens, and trees that grow from the last
// tokens level by level.
#pragma once

#include "layer.h"
#include "trees.h"

struct Norm {
    const float* weight;  // [width]; null: rows stay as they are
    float eps;
};

// Embedding table of numbers of `kind`.
struct Embedding {
    const void* weight;
    int64_t row, column, count, kind;  // strides between tokens and between elements; number of tokens

    void read(int64_t token, int64_t width, float* out) const {
        token = std::clamp<int64_t>(token, 0, count - 1);
        by_kind(kind, [&](auto number) {
            auto* from = (const decltype(number)*)weight + token * row;
            if (column == 1) return copy_row(from, width, out);
            for (int64_t i = 0; i < width; i++) out[i] = load_some(from + i * column, 1)[0];
        });
    }
};

// Per-slot state of the sequences that a pass reads and writes.
struct Sequences {
    const int64_t* block_tables;
    int64_t table_stride, table_width, block_size;
    int64_t first_private, num_private;  // blocks for the drafted rows of a pass, `num_private` per request
    const float *cos, *sin;              // [num_angles, dim], by position
    int64_t num_angles;
    float* hidden;                       // [slots, hidden]: hidden state at each sequence's last committed pair
    const int64_t* deltas;               // by slot: offset added to positions before rotation; or null

    int64_t block(int64_t slot, int64_t index) const {
        return block_tables[slot * table_stride + std::min(index, table_width - 1)];
    }
};

// Decided pairs of some sequences, `num_tokens` per sequence.
struct Decided {
    int64_t num_reqs;
    const int64_t *slots, *positions, *num_tokens, *token_ids;
    const float* taps;
    int64_t token_stride, taps_stride;  // between sequences
};

struct Roots {
    int64_t num_reqs;
    const int64_t* slots;
    const int64_t* lens;  // by slot, as `history` [slots, history_stride], `temperatures` and `seeds`
    const int64_t* history;
    const float* temperatures;
    const int64_t* seeds;
    int64_t history_stride, history_width;
    const int32_t* allowed;  // [num_reqs, allowed_words], or null
    int64_t allowed_words;
    int64_t top_k, num_levels;  // num_levels counts the roots' children as a level
    GrowthRules rules;
    Trees trees;
    int64_t by_slot;  // non-zero: trees are written to the rows of their slots
    SamplingRules sampling;

    // Number of committed rows of a tree's sequence.
    int64_t committed(int64_t tree) const { return std::max<int64_t>(lens[slots[tree]] - 1, 0); }

    // Last token of a tree's sequence.
    int64_t token(int64_t tree) const {
        int64_t last = std::clamp<int64_t>(lens[slots[tree]] - 1, 0, history_width - 1);
        return history[slots[tree] * history_stride + last];
    }
};

struct Room {
    std::vector<float> taps, features, inputs, normed, stream, hidden, before, logits, cos, sin, noise;
    std::vector<float> factors, states;
    std::vector<int64_t> tokens, slots, wanted, context, positions, tables, starts, candidates;
    int64_t table_width;
    std::vector<uint64_t> mask;
    std::vector<Table> trees;
    std::vector<Scored> best;
};

template <class T>
static T* room(std::vector<T>& of, int64_t count) {
    if ((int64_t)of.size() < count) of.resize(count);
    return of.data();
}

static void norm_or_copy(const Norm& norm, const float* x, int64_t width, float* out) {
    if (norm.weight) norm_row(x, norm.weight, norm.eps, width, out);
    else if (out != x) memcpy(out, x, width * sizeof(float));
}

// Copies the rotary angles of a position of the sequence in `slot`.
static void copy_angles(const Sequences& all, int64_t dim, int64_t slot, int64_t position, int64_t row, float* cos, float* sin) {
    if (all.deltas) position += all.deltas[slot];
    position = std::clamp<int64_t>(position, 0, all.num_angles - 1);
    memcpy(cos + row * dim, all.cos + position * dim, dim * sizeof(float));
    memcpy(sin + row * dim, all.sin + position * dim, dim * sizeof(float));
}

static bool another_level_pays(const Roots& roots, Room& at) {
    bool any = !roots.rules.num_rules;
    for (int64_t i = 0; i < roots.rules.num_rules; i++) {
        const GrowthRule& rule = roots.rules.rules[i];
        double mass = 0.0;
        for (int64_t tree = rule.begin; tree < rule.end; tree++) {
            int64_t row = rule.by_kind ? roots.temperatures[roots.slots[tree]] > 0 : tree - rule.begin;
            mass += at.trees[tree].worth(roots.rules, rule, rule.table + row * roots.rules.num_bins);
        }
        any |= mass > rule.min_reach;
    }
    return any;
}

// Builds block tables in which private blocks follow each context.
static void reserve(const Sequences& all, const Roots& roots, Room& at) {
    int64_t longest = 0;
    for (int64_t tree = 0; tree < roots.num_reqs; tree++)
        longest = std::max(longest, (roots.committed(tree) + all.block_size - 1) / all.block_size);
    longest += all.num_private;
    int64_t* tables = room(at.tables, roots.num_reqs * longest);
    at.table_width = longest;
    for (int64_t tree = 0; tree < roots.num_reqs; tree++) {
        int64_t slot = roots.slots[tree], full = (roots.committed(tree) + all.block_size - 1) / all.block_size;
        for (int64_t block = 0; block < longest; block++) {
            int64_t own = all.first_private + tree * all.num_private + std::min(block - full, all.num_private - 1);
            tables[tree * longest + block] = block < full ? all.block(slot, block) : own;
        }
    }
}


// Concatenates decided pairs: tokens, slots in the KV pool, angles of `dim` numbers, taps of `taps_width`, and where
// each sequence starts. Returns the number of rows.
static int64_t gather(const Sequences& all, const Decided& decided, int64_t taps_width, int64_t dim, Room& at) {
    int64_t num_reqs = decided.num_reqs, num_rows = 0;
    int64_t* starts = room(at.starts, num_reqs + 1);
    for (int64_t i = 0; i < num_reqs; i++) starts[i] = num_rows, num_rows += decided.num_tokens[i];
    starts[num_reqs] = num_rows;
    int64_t *tokens = room(at.tokens, num_rows), *slots = room(at.slots, num_rows);
    float *cos = room(at.cos, num_rows * dim), *sin = room(at.sin, num_rows * dim);
    float* taps = room(at.taps, num_rows * taps_width);
    for (int64_t i = 0; i < num_reqs; i++) {
        int64_t count = decided.num_tokens[i];
        memcpy(tokens + starts[i], decided.token_ids + i * decided.token_stride, count * sizeof(int64_t));
        memcpy(taps + starts[i] * taps_width, decided.taps + i * decided.taps_stride, count * taps_width * sizeof(float));
        for (int64_t j = 0; j < count; j++) {
            int64_t row = starts[i] + j, position = decided.positions[i] + j;
            slots[row] = all.block(decided.slots[i], position / all.block_size) * all.block_size;
            slots[row] += position % all.block_size;
            copy_angles(all, dim, decided.slots[i], position, row, cos, sin);
        }
    }
    return num_rows;
}

// Converts scores of candidates to ranks: tokens that are not allowed after the root get -infinity, the sequence's
// sampling rules change scores, and sampled sequences get the target's noise.
struct Ranking {
    const int64_t* token_ids;
    int64_t count;
    float temperature;
    const float* noise;      // [count]; ignored if the temperature is 0
    const int32_t* allowed;  // or null
    Ruled& ruled;
    bool whole;  // the tokens are a whole vocabulary, not a few candidates

    // `noise` is a buffer of `count` floats for the tree.
    static Ranking of(const Roots& roots, int64_t tree, int64_t level, const int64_t* token_ids, int64_t count,
                      float* noise, Room& at, bool whole = true) {
        int64_t slot = roots.slots[tree];
        float temperature = roots.temperatures[slot];
        if (temperature > 0)
            gumbel({temperature, roots.seeds[slot], roots.lens[slot] + level}, token_ids, count, noise);
        const int32_t* allowed = roots.allowed && !level ? roots.allowed + tree * roots.allowed_words : nullptr;
        return {token_ids, count, temperature, noise, allowed, at.trees[tree].ruled, whole};
    }

    // Selects the best of `scores`, which are modified in place, by log-probability.
    void best_of(float* scores, Best& best) const {
        if (allowed) allow_only(allowed, token_ids, count, scores);
        ruled.apply(token_ids, count, temperature, whole, scores);
        for (int64_t i = 0; temperature > 0 && i < count; i += LANES) {
            vec score = load_upto(scores + i, count - i) / temperature + load_upto(noise + i, count - i);
            store_upto(scores + i, score, count - i);
        }
        Likeliest whole = likeliest(scores, count, best);
        for (int64_t i = 0; i < best.count; i++) best.kept[i].score = (best.kept[i].score - whole.top) - whole.log_sum;
    }

    // Enters the best tokens as candidate children of a node of the tree's frontier.
    void enter(const Best& best, int64_t node, Table& table) const {
        int64_t above = table.frontier[node].index;
        for (int64_t i = 0; i < best.count; i++)
            table.enter(above, token_ids[best.kept[i].index], best.kept[i].score);
    }
};

// Resets each tree to its root, and prepares the sequence's sampling rules.
static void begin_trees(const Roots& roots, Room& at) {
    if ((int64_t)at.trees.size() < roots.num_reqs) at.trees.resize(roots.num_reqs);
    for (int64_t tree = 0; tree < roots.num_reqs; tree++) {
        int64_t slot = roots.slots[tree], length = std::clamp<int64_t>(roots.lens[slot], 0, roots.history_width);
        at.trees[tree].begin(roots.top_k, roots.token(tree));
        at.trees[tree].ruled.begin(roots.sampling, slot, roots.history + slot * roots.history_stride, length);
    }
}

// Grows a tree from each root, after `begin_trees`: `expand(level, width)` enters candidate children of `width` nodes
// of each frontier. Returns the number of levels grown.
template <class Expand>
static int64_t grow_levels(const Roots& roots, Room& at, const Expand& expand) {
    int64_t num_reqs = roots.num_reqs, num_words = ((roots.num_levels - 1) * roots.top_k + 63) / 64;
    int64_t level = 0, width = 1;
    while (true) {
        expand(level, width);
        if (++level >= roots.num_levels) break;
        for (int64_t tree = 0; tree < num_reqs; tree++)
            at.trees[tree].choose(at.trees[tree].size - width * roots.top_k, level, num_words);
        if (!another_level_pays(roots, at)) break;
        width = roots.top_k;
    }
    for (int64_t tree = 0; tree < num_reqs; tree++)
        roots.trees.write(at.trees[tree], roots.by_slot ? roots.slots[tree] : tree);
    return level;
}
