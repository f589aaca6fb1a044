// One pass of an EAGLE head for some sequences: `take_in` runs decided pairs, then `grow` grows a tree from each root.
// The decoder layer is in `layer.h`, tree growth in `growth.h`. A P-EAGLE head drafts its tree in one pass over masked
// slots.
#pragma once

#include "walks.h"

struct Head {
    Layer layer;  // its caches are the drafter's KV pool
    Embedding embedding;
    Norm embedding_norm, feature_norm, output_norm;
    Matrix joined;  // EAGLE-1: [2 * hidden, hidden], from token and feature to the layer's input; no weight: EAGLE-3
    const Norm* tap_norms;  // [num_taps], or null
    int64_t num_taps, tap_width;
    Norm taps_norm;  // over the concatenated taps
    Matrix fused;    // [num_taps * tap_width, hidden]; no weight: the taps are the features
    Matrix logits;
    const int64_t* draft_token_ids;
    int64_t norms_feedback, norms_residual;
    const Layer* behind;  // [num_behind] layers that run after the first one
    int64_t num_behind;
    const float* mask_features;  // P-EAGLE: [hidden], feature of a masked slot, whose token is mask_token; else null
    int64_t mask_token;
};

// Runs a head over pairs of tokens and features [num_rows, hidden]. All layers but the last run all rows, which `whole`
// describes; the last layer runs the rows that `last` describes, and writes `out` [num_wanted, hidden]. May overwrite
// `features`.
static void run_head(const Head& head, const Batch& whole, const Batch& last, const int64_t* token_ids, float* features,
                     float* out, Room& at) {
    int64_t hidden = head.layer.hidden, num_rows = last.num_rows;
    float* inputs = room(at.inputs, num_rows * 3 * hidden);
    by_row(num_rows, 2 * hidden, [&](int64_t row) {
        float *own = inputs + row * 2 * hidden, *feature = features + row * hidden;
        head.embedding.read(token_ids[row], hidden, own);
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
    float *stream = room(at.stream, head.num_behind ? 2 * num_rows * hidden : 0), *next = stream + num_rows * hidden;
    run_layer(head.layer, head.num_behind ? whole : last, inputs, residual, head.num_behind ? stream : out);
    for (int64_t index = 0; index < head.num_behind; index++) {
        bool ends = index + 1 == head.num_behind;
        run_layer(head.behind[index], ends ? last : whole, nullptr, stream, ends ? out : next);
        std::swap(stream, next);
    }
}

static void take_in(const Head& head, const Sequences& all, const Decided& decided, Room& at) {
    int64_t num_reqs = decided.num_reqs, hidden = head.layer.hidden, dim = head.layer.heads.key_dim;
    int64_t taps_width = head.num_taps * head.tap_width, longest = 0;
    int64_t num_rows = gather(all, decided, taps_width, dim, at);
    float *taps = at.taps.data(), *features = room(at.features, num_rows * hidden);
    for (int64_t row = 0; row < num_rows; row++) {
        float* own = taps + row * taps_width;
        for (int64_t tap = 0; head.tap_norms && tap < head.num_taps; tap++)
            norm_or_copy(head.tap_norms[tap], own + tap * head.tap_width, head.tap_width, own + tap * head.tap_width);
        norm_or_copy(head.taps_norm, own, taps_width, own);
    }
    if (head.fused.weight)
        products(taps, taps_width, num_rows, taps_width, &head.fused, 1, nullptr, nullptr, 0, features, hidden);
    else
        memcpy(features, taps, num_rows * hidden * sizeof(float));
    int64_t *wanted = room(at.wanted, num_reqs), *context = room(at.context, num_reqs), most = 0;
    for (int64_t i = 0; i < num_reqs; i++) {
        most = std::max(most, decided.num_tokens[i]);
        longest = std::max(longest, (decided.positions[i] + decided.num_tokens[i] - 1) / all.block_size + 1);
    }
    int64_t* tables = room(at.tables, num_reqs * longest);
    for (int64_t i = 0; i < num_reqs; i++) {
        wanted[i] = at.starts[i + 1] - 1;
        context[i] = decided.positions[i] + decided.num_tokens[i] - 1;
        for (int64_t block = 0; block < longest; block++) tables[i * longest + block] = all.block(decided.slots[i], block);
    }
    Segment segment{0, num_reqs, 1, 1, tables, longest, longest, context, context, 1, nullptr, 0, 0, nullptr};
    Segment every{0, num_reqs, most, most, tables, longest, longest, decided.positions, nullptr, 0, nullptr, 0, 0,
                  at.starts.data()};
    Batch whole{num_rows, all.block_size, at.cos.data(), at.sin.data(), at.slots.data(), &every, 1}, last = whole;
    last.segments = &segment, last.wanted = wanted, last.num_wanted = num_reqs;
    float* out = room(at.hidden, num_reqs * hidden);
    run_head(head, whole, last, at.tokens.data(), features, out, at);
    for (int64_t i = 0; i < num_reqs; i++)
        memcpy(all.hidden + decided.slots[i] * hidden, out + i * hidden, hidden * sizeof(float));
}

// Enters the candidate children of each frontier node of each tree, scored from hidden states [num_reqs * width,
// hidden]. The states become the features of the next level.
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
        Ranking ranking = Ranking::of(roots, tree, level, head.draft_token_ids, vocab, noise + tree * vocab, at);
        for (int64_t node = 0; node < width; node++) {
            int64_t row = tree * width + node;
            Best best{at.best.data() + row * roots.top_k, roots.top_k, 0};
            ranking.best_of(logits + row * vocab, best);
            ranking.enter(best, node, at.trees[tree]);
        }
    });
}

// Runs the rows of a level whose nodes are expanded; their keys and values are stored after the context and the earlier
// levels.
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
        // A chain is causal: earlier draft tokens count as context.
        context[tree] = committed + (width == 1 ? level - 1 : 0);
        for (int64_t node = 0; node < width; node++) {
            int64_t row = tree * width + node, index = committed + (level - 1) * width + node;
            tokens[row] = table.token_ids[table.frontier[node].index];
            slots[row] = at.tables[tree * longest + index / all.block_size] * all.block_size + index % all.block_size;
            copy_angles(all, dim, roots.slots[tree], committed + level - 1, row, cos, sin);
            int64_t above = tree * width_before + table.parent[node];
            memcpy(features + row * size, before + above * size, size * sizeof(float));
            positions[tree * most + (level - 1) * width + node] = committed + level - 1;
        }
        memcpy(mask + tree * width * num_words, table.visible.data(), width * num_words * sizeof(uint64_t));
    }
    Segment segment{0, num_reqs, width, num_nodes, at.tables.data(), longest, longest, context, positions, most,
                    (const int64_t*)mask, width * num_words, num_words, nullptr};
    if (width == 1) segment.num_new = 1, segment.mask = nullptr, segment.mask_stride = segment.mask_words = 0;
    Batch batch{num_rows, all.block_size, cos, sin, slots, &segment, 1};
    run_head(head, batch, batch, tokens, features, out, at);
}

// Grows a tree from each root by one pass over masked slots after the sequence's pairs. Returns the number of levels
// grown.
static int64_t grow_masked(const Head& head, const Sequences& all, const Roots& roots, Room& at) {
    int64_t num_reqs = roots.num_reqs, num_masked = roots.num_levels - 1, num_rows = num_reqs * num_masked;
    int64_t size = head.layer.hidden, dim = head.layer.heads.key_dim, longest = at.table_width, vocab = head.logits.columns;
    int64_t *tokens = room(at.tokens, num_rows), *slots = room(at.slots, num_rows), *context = room(at.context, num_reqs);
    float *cos = room(at.cos, num_rows * dim), *sin = room(at.sin, num_rows * dim);
    float *features = room(at.features, num_rows * size), *out = room(at.hidden, num_rows * size);
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t tree = row / num_masked, index = roots.committed(tree) + row % num_masked;
        context[tree] = roots.committed(tree), tokens[row] = head.mask_token;
        slots[row] = at.tables[tree * longest + index / all.block_size] * all.block_size + index % all.block_size;
        copy_angles(all, dim, roots.slots[tree], index, row, cos, sin);
        memcpy(features + row * size, head.mask_features, size * sizeof(float));
    }
    Segment segment{0, num_reqs, num_masked, num_masked, at.tables.data(), longest, longest, context};
    Batch batch{num_rows, all.block_size, cos, sin, slots, &segment, 1};
    if (num_rows) run_head(head, batch, batch, tokens, features, out, at);
    float* normed = room(at.features, num_reqs * roots.num_levels * size);
    for (int64_t row = 0; row < num_reqs * roots.num_levels; row++) {
        int64_t tree = row / roots.num_levels, level = row % roots.num_levels;
        const float* from = level ? out + (tree * num_masked + level - 1) * size : all.hidden + roots.slots[tree] * size;
        norm_or_copy(head.output_norm, from, size, normed + row * size);
    }
    float* logits = room(at.logits, num_reqs * roots.num_levels * vocab);
    products(normed, size, num_reqs * roots.num_levels, size, &head.logits, 1, nullptr, nullptr, 0, logits, vocab);
    return grow_by({nullptr, nullptr, head.draft_token_ids, size, vocab}, {normed, logits}, roots, at);
}

// Grows a tree from each root. Returns the number of levels grown.
static int64_t grow(const Head& head, const Sequences& all, const Roots& roots, Room& at) {
    reserve(all, roots, at);
    if (head.mask_features) return grow_masked(head, all, roots, at);
    int64_t num_reqs = roots.num_reqs, size = head.layer.hidden, width_before = 1;
    float *hidden = room(at.hidden, num_reqs * roots.top_k * size), *before = room(at.before, num_reqs * roots.top_k * size);
    for (int64_t tree = 0; tree < num_reqs; tree++)
        memcpy(hidden + tree * size, all.hidden + roots.slots[tree] * size, size * sizeof(float));
    begin_trees(roots, at);
    return grow_levels(roots, at, [&](int64_t level, int64_t width) {
        if (level) {
            std::swap(hidden, before);
            run_level(head, all, roots, level, before, width_before, hidden, at);
        }
        width_before = width;
        add_candidates(head, roots, level, width, hidden, at);
    });
}
