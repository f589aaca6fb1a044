// A pass of an EAGLE head for some sequences: decided pairs are taken in, then a tree grows from each root. The parts
// of the layer are `layer.h`'s; trees are `trees.h`'s.
#pragma once

#include "layer.h"
#include "trees.h"

struct Norm {
    const float* weight;  // [width], or null: rows stay as they are
    float eps;
};

struct Head {
    Layer layer;  // its caches are the pool's
    const void* embedding;  // of the layer's kind
    int64_t embedding_row, embedding_column, num_embeddings;  // strides
    Norm embedding_norm, feature_norm, output_norm;
    Matrix joined;  // EAGLE-1: [2 * hidden, hidden], what the layer reads of token and feature; without weight EAGLE-3
    const Norm* tap_norms;  // [num_taps], or null
    int64_t num_taps, tap_width;
    Norm taps_norm;  // of all taps together
    Matrix fused;    // [num_taps * tap_width, hidden]; without weight the taps are the features
    Matrix logits;
    const int64_t* draft_token_ids;
    int64_t norms_feedback, norms_residual;
};

// What a pass reads and writes of the sequences, by slot.
struct Sequences {
    const int64_t* block_tables;
    int64_t table_stride, table_width, block_size;
    int64_t first_private, num_private;  // blocks of a pass, by request
    const float *cos, *sin;              // [num_angles, dim], by position
    int64_t num_angles;
    float* hidden;                       // [slots, hidden]: at each one's last committed pair

    int64_t block(int64_t slot, int64_t index) const {
        return block_tables[slot * table_stride + std::min(index, table_width - 1)];
    }
};

// Decided pairs of some sequences, `num_tokens` of each.
struct Decided {
    int64_t num_reqs;
    const int64_t *slots, *positions, *num_tokens, *token_ids;
    const float* taps;
    int64_t token_stride, taps_stride;  // from sequence to sequence
};

struct Roots {
    int64_t num_reqs;
    const int64_t* slots;
    const int64_t* lens;  // by slot, as the next three; history [slots, history_stride]
    const int64_t* history;
    const float* temperatures;
    const int64_t* seeds;
    int64_t history_stride, history_width;
    const int32_t* allowed;  // [num_reqs, allowed_words], or null
    int64_t allowed_words;
    int64_t top_k, num_levels;  // levels of nodes, the roots' children included
    GrowthRules rules;
    Trees trees;
    int64_t by_slot;  // trees are written into the rows of their slots

    // Rows of a tree's sequence that are stored.
    int64_t committed(int64_t tree) const { return std::max<int64_t>(lens[slots[tree]] - 1, 0); }
};

struct Room {
    std::vector<float> features, inputs, normed, hidden, before, logits, cos, sin, noise;
    std::vector<int64_t> tokens, slots, wanted, context, positions, tables, starts;
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

static void embed(const Head& head, int64_t token, float* out) {
    token = std::clamp<int64_t>(token, 0, head.num_embeddings - 1);
    by_kind(head.layer.kind, [&](auto number) {
        auto* row = (const decltype(number)*)head.embedding + token * head.embedding_row;
        if (head.embedding_column == 1) return copy_row(row, head.layer.hidden, out);
        for (int64_t i = 0; i < head.layer.hidden; i++) out[i] = load_some(row + i * head.embedding_column, 1)[0];
    });
}

// out [wanted rows, hidden] of pairs: tokens and features [num_rows, hidden]. Features may be changed.
static void run_head(const Head& head, const Batch& batch, const int64_t* token_ids, float* features, float* out,
                     Room& at) {
    int64_t hidden = head.layer.hidden, num_rows = batch.num_rows;
    float* inputs = room(at.inputs, num_rows * 3 * hidden);
    by_row(num_rows, 2 * hidden, [&](int64_t row) {
        float *own = inputs + row * 2 * hidden, *feature = features + row * hidden;
        embed(head, token_ids[row], own);
        norm_or_copy(head.embedding_norm, own, hidden, own);
        norm_or_copy(head.feature_norm, feature, hidden, own + hidden);
        if (head.norms_residual) memcpy(feature, own + hidden, hidden * sizeof(float));
    });
    const float* residual = features;
    if (head.joined.weight) {
        float* joined = inputs + num_rows * 2 * hidden;
        products(inputs, 2 * hidden, num_rows, 2 * hidden, &head.joined, 1, nullptr, nullptr, 0, joined, hidden);
        residual = inputs = joined;
    }
    run_layer(head.layer, batch, inputs, residual, out);
}

static void copy_angles(const Sequences& all, int64_t dim, int64_t position, int64_t row, float* cos, float* sin) {
    position = std::clamp<int64_t>(position, 0, all.num_angles - 1);
    memcpy(cos + row * dim, all.cos + position * dim, dim * sizeof(float));
    memcpy(sin + row * dim, all.sin + position * dim, dim * sizeof(float));
}

static void take_in(const Head& head, const Sequences& all, const Decided& decided, Room& at) {
    int64_t num_reqs = decided.num_reqs, num_rows = 0, hidden = head.layer.hidden, dim = head.layer.heads.key_dim;
    int64_t* starts = room(at.starts, num_reqs + 1);
    for (int64_t i = 0; i < num_reqs; i++) starts[i] = num_rows, num_rows += decided.num_tokens[i];
    int64_t taps_width = head.num_taps * head.tap_width, longest = 0;
    int64_t *tokens = room(at.tokens, num_rows), *slots = room(at.slots, num_rows);
    float *cos = room(at.cos, num_rows * dim), *sin = room(at.sin, num_rows * dim);
    float *taps = room(at.normed, num_rows * taps_width), *features = room(at.features, num_rows * hidden);
    for (int64_t i = 0; i < num_reqs; i++) {
        for (int64_t j = 0; j < decided.num_tokens[i]; j++) {
            int64_t row = starts[i] + j, position = decided.positions[i] + j;
            tokens[row] = decided.token_ids[i * decided.token_stride + j];
            slots[row] = all.block(decided.slots[i], position / all.block_size) * all.block_size;
            slots[row] += position % all.block_size;
            copy_angles(all, dim, position, row, cos, sin);
            const float* from = decided.taps + i * decided.taps_stride + j * taps_width;
            float* own = taps + row * taps_width;
            memcpy(own, from, taps_width * sizeof(float));
            for (int64_t tap = 0; head.tap_norms && tap < head.num_taps; tap++)
                norm_or_copy(head.tap_norms[tap], own + tap * head.tap_width, head.tap_width,
                             own + tap * head.tap_width);
            norm_or_copy(head.taps_norm, own, taps_width, own);
            longest = std::max(longest, position / all.block_size + 1);
        }
    }
    if (head.fused.weight)
        products(taps, taps_width, num_rows, taps_width, &head.fused, 1, nullptr, nullptr, 0, features, hidden);
    else
        memcpy(features, taps, num_rows * hidden * sizeof(float));
    int64_t *wanted = room(at.wanted, num_reqs), *context = room(at.context, num_reqs);
    int64_t* tables = room(at.tables, num_reqs * longest);
    for (int64_t i = 0; i < num_reqs; i++) {
        wanted[i] = starts[i] + decided.num_tokens[i] - 1;
        context[i] = decided.positions[i] + decided.num_tokens[i] - 1;
        for (int64_t block = 0; block < longest; block++) tables[i * longest + block] = all.block(decided.slots[i], block);
    }
    Segment segment{0, num_reqs, 1, 1, tables, longest, longest, context, context, 1, nullptr, 0, 0, nullptr};
    Batch batch{num_rows, all.block_size, cos, sin, slots, &segment, 1, nullptr, nullptr, 0, wanted, num_reqs};
    float* out = room(at.hidden, num_reqs * hidden);
    run_head(head, batch, tokens, features, out, at);
    for (int64_t i = 0; i < num_reqs; i++)
        memcpy(all.hidden + decided.slots[i] * hidden, out + i * hidden, hidden * sizeof(float));
}

// What may follow each frontier node of each tree, by hidden states [num_reqs * width, hidden], becomes entries; the
// states become what the next level is fed with.
static void add_candidates(const Head& head, const Roots& roots, int64_t level, int64_t width, float* hidden, Room& at) {
    int64_t size = head.layer.hidden, num_rows = roots.num_reqs * width, vocab = head.logits.columns;
    float *normed = room(at.normed, num_rows * size), *logits = room(at.logits, num_rows * vocab);
    for (int64_t row = 0; row < num_rows; row++) {
        norm_or_copy(head.output_norm, hidden + row * size, size, normed + row * size);
        if (head.norms_feedback) memcpy(hidden + row * size, normed + row * size, size * sizeof(float));
    }
    products(normed, size, num_rows, size, &head.logits, 1, nullptr, nullptr, 0, logits, vocab);
    room(at.best, num_rows * roots.top_k);
    float* noise = room(at.noise, roots.num_reqs * vocab);
    threads.share(roots.num_reqs, [&](int64_t tree) {
        int64_t slot = roots.slots[tree];
        float temperature = roots.temperatures[slot], *own_noise = noise + tree * vocab;
        if (temperature > 0)
            gumbel({temperature, roots.seeds[slot], roots.lens[slot] + level}, head.draft_token_ids, vocab, own_noise);
        Table& table = at.trees[tree];
        for (int64_t node = 0; node < width; node++) {
            int64_t row = tree * width + node;
            float* own = logits + row * vocab;
            if (!level && roots.allowed)
                allow_only(roots.allowed + tree * roots.allowed_words, head.draft_token_ids, vocab, own);
            for (int64_t i = 0; temperature > 0 && i < vocab; i += LANES) {
                vec score = load_upto(own + i, vocab - i) / temperature + load_upto(own_noise + i, vocab - i);
                store_upto(own + i, score, vocab - i);
            }
            Best best{at.best.data() + row * roots.top_k, roots.top_k, 0};
            Likeliest whole = likeliest(own, vocab, best);
            for (int64_t i = 0; i < best.count; i++) {
                Scored one = best.kept[i];
                table.enter(table.frontier[node].index, head.draft_token_ids[one.index], (one.score - whole.top) - whole.log_sum);
            }
        }
    });
}

// Rows of a level that is expanded: its nodes lie behind the context and the levels before.
static void run_level(const Head& head, const Sequences& all, const Roots& roots, int64_t level, const float* before,
                      int64_t width_before, float* out, Room& at) {
    int64_t width = roots.top_k, num_reqs = roots.num_reqs, num_rows = num_reqs * width, size = head.layer.hidden;
    int64_t dim = head.layer.heads.key_dim, num_nodes = level * width, most = (roots.num_levels - 1) * width;
    int64_t num_words = (most + 63) / 64, longest = at.table_width;
    int64_t *tokens = room(at.tokens, num_rows), *slots = room(at.slots, num_rows);
    float *cos = room(at.cos, num_rows * dim), *sin = room(at.sin, num_rows * dim);
    float* features = room(at.features, num_rows * size);
    int64_t *context = room(at.context, num_reqs), *positions = room(at.positions, num_reqs * most);
    uint64_t* mask = room(at.mask, num_rows * num_words);
    for (int64_t tree = 0; tree < num_reqs; tree++) {
        const Table& table = at.trees[tree];
        int64_t committed = roots.committed(tree);
        // A chain is causal: what was drafted before is context of what comes next.
        context[tree] = committed + (width == 1 ? level - 1 : 0);
        for (int64_t node = 0; node < width; node++) {
            int64_t row = tree * width + node, index = committed + (level - 1) * width + node;
            tokens[row] = table.token_ids[table.frontier[node].index];
            slots[row] = at.tables[tree * longest + index / all.block_size] * all.block_size + index % all.block_size;
            copy_angles(all, dim, committed + level - 1, row, cos, sin);
            int64_t above = tree * width_before + table.parent[node];
            memcpy(features + row * size, before + above * size, size * sizeof(float));
            positions[tree * most + (level - 1) * width + node] = committed + level - 1;
        }
        memcpy(mask + tree * width * num_words, table.visible.data(), width * num_words * sizeof(uint64_t));
    }
    Segment segment{0, num_reqs, width, num_nodes, at.tables.data(), longest, longest, context, positions, most,
                    (const int64_t*)mask, width * num_words, num_words, nullptr};
    if (width == 1) segment.num_new = 1, segment.mask = nullptr, segment.mask_stride = segment.mask_words = 0;
    Batch batch{num_rows, all.block_size, cos, sin, slots, &segment, 1, nullptr, nullptr, 0, nullptr, 0};
    run_head(head, batch, tokens, features, out, at);
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

// Block tables in which private blocks follow each context.
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

// Returns the levels that were grown.
static int64_t grow(const Head& head, const Sequences& all, const Roots& roots, Room& at) {
    int64_t num_reqs = roots.num_reqs, size = head.layer.hidden, num_words = ((roots.num_levels - 1) * roots.top_k + 63) / 64;
    if ((int64_t)at.trees.size() < num_reqs) at.trees.resize(num_reqs);
    float *hidden = room(at.hidden, num_reqs * roots.top_k * size), *before = room(at.before, num_reqs * roots.top_k * size);
    for (int64_t tree = 0; tree < num_reqs; tree++) {
        int64_t slot = roots.slots[tree], last = std::clamp<int64_t>(roots.lens[slot] - 1, 0, roots.history_width - 1);
        at.trees[tree].begin(roots.top_k, roots.history[slot * roots.history_stride + last]);
        memcpy(hidden + tree * size, all.hidden + slot * size, size * sizeof(float));
    }
    reserve(all, roots, at);
    add_candidates(head, roots, 0, 1, hidden, at);
    int64_t width = 1, level = 1;
    for (; level < roots.num_levels; level++) {
        int64_t entered = width * roots.top_k;
        for (int64_t tree = 0; tree < num_reqs; tree++)
            at.trees[tree].choose(at.trees[tree].size - entered, level, num_words);
        if (!another_level_pays(roots, at)) break;
        std::swap(hidden, before);
        run_level(head, all, roots, level, before, width, hidden, at);
        width = roots.top_k;
        add_candidates(head, roots, level, width, hidden, at);
    }
    for (int64_t tree = 0; tree < num_reqs; tree++)
        roots.trees.write(at.trees[tree], roots.by_slot ? roots.slots[tree] : tree);
    return level;
}
