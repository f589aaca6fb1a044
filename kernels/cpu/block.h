// One pass of a block drafter (DFlash body). `take_in` computes keys and values of decided positions from taps alone;
// `grow` then runs all masked slots after those positions through the layers together, and grows trees from the slots'
// logits.
#pragma once

#include "walks.h"

struct BlockHead {
    const Layer* layers;  // their caches are the drafter's KV pool
    const int64_t* causal;  // by layer: non-zero if a slot sees only the slots before it
    int64_t num_layers;
    Embedding embedding;
    float embedding_scale;
    const float* mask;  // [hidden]: input embedding of masked slots
    int64_t taps_width;
    Matrix fused;  // [taps_width, hidden]
    Norm context_norm;
    const Matrix* context;  // by layer, [hidden, keys and values]: weights from fused taps to keys and values
    Norm output_norm;
    Matrix logits;
    float logit_scale, logit_softcap;  // softcap 0: none
    const int64_t* draft_token_ids;
    // slots of a block, including the last decided token's; first slot whose logits predict a level
    int64_t num_slots, first_slot;
    Markov markov;
    Lattice lattice;
};

static void take_in(const BlockHead& head, const Sequences& all, const Decided& decided, Room& at) {
    const Layer& first = head.layers[0];
    int64_t hidden = first.hidden, dim = first.heads.key_dim, kv_heads = first.heads.num_kv_heads;
    int64_t num_rows = gather(all, decided, head.taps_width, dim, at), own_width = 2 * kv_heads * dim;
    int64_t width = head.num_layers * own_width;
    if (!num_rows) return;
    float *features = room(at.features, num_rows * hidden), *made = room(at.inputs, num_rows * width);
    products(at.taps.data(), head.taps_width, num_rows, head.taps_width, &head.fused, 1, nullptr, nullptr, 0, features, hidden);
    by_row(num_rows, hidden, [&](int64_t row) {
        norm_or_copy(head.context_norm, features + row * hidden, hidden, features + row * hidden);
    });
    products(features, hidden, num_rows, hidden, head.context, (int)head.num_layers, nullptr, nullptr, 0, made, width);
    by_row(num_rows, width, [&](int64_t row) {
        for (int64_t index = 0; index < head.num_layers; index++) {
            const Layer& layer = head.layers[index];
            float* key = made + row * width + index * own_width;
            for (int64_t h = 0; h < kv_heads; h++)
                norm_and_rotate(layer, layer.key_norm, key + h * dim, at.cos.data() + row * dim, at.sin.data() + row * dim);
            store_row(layer, at.slots[row], key);
        }
    });
}

// Number of slots to run. If every layer is causal, the slots after the last grown level affect no other slot and are
// left out.
static int64_t slots_run(const BlockHead& head, const Roots& roots) {
    bool all_causal = std::all_of(head.causal, head.causal + head.num_layers, [](int64_t causal) { return causal; });
    return all_causal ? head.first_slot + roots.num_levels : head.num_slots;
}

// Runs a block per tree. Returns the hidden states after the last layer, [num_reqs * num_slots, hidden].
static const float* run_block(const BlockHead& head, const Sequences& all, const Roots& roots, int64_t num_slots, Room& at) {
    const Layer& first = head.layers[0];
    int64_t size = first.hidden, dim = first.heads.key_dim, num_reqs = roots.num_reqs;
    int64_t num_rows = num_reqs * num_slots, num_words = (num_slots + 63) / 64, longest = at.table_width;
    float *stream = room(at.hidden, num_rows * size), *next = room(at.before, num_rows * size);
    float *cos = room(at.cos, num_rows * dim), *sin = room(at.sin, num_rows * dim);
    int64_t *slots = room(at.slots, num_rows), *positions = room(at.positions, num_rows);
    int64_t* context = room(at.context, num_reqs);
    uint64_t* mask = room(at.mask, num_rows * num_words);
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t tree = row / num_slots, slot = row % num_slots, index = roots.committed(tree) + slot;
        float* own = stream + row * size;
        if (slot) memcpy(own, head.mask, size * sizeof(float));
        else head.embedding.read(roots.token(tree), size, own);
        for (int64_t i = 0; !slot && i < size; i++) own[i] *= head.embedding_scale;
        context[tree] = roots.committed(tree), positions[row] = index;
        slots[row] = at.tables[tree * longest + index / all.block_size] * all.block_size + index % all.block_size;
        copy_angles(all, dim, roots.slots[tree], index, row, cos, sin);
        for (int64_t word = 0; word < num_words; word++) {
            int64_t left = num_slots - word * 64;
            mask[row * num_words + word] = left < 64 ? (1ull << left) - 1 : ~0ull;
        }
    }
    Segment whole{0, num_reqs, num_slots, num_slots, at.tables.data(), longest, longest, context, positions, num_slots,
                  (const int64_t*)mask, num_slots * num_words, num_words, nullptr};
    Segment causal = whole;
    causal.mask = nullptr, causal.mask_stride = causal.mask_words = 0;
    Batch batch{num_rows, all.block_size, cos, sin, slots, nullptr, 1, nullptr, 0, nullptr, 0, num_slots};
    for (int64_t index = 0; index < head.num_layers; index++) {
        batch.segments = head.causal[index] ? &causal : &whole;
        run_layer(head.layers[index], batch, nullptr, stream, next);
        std::swap(stream, next);
    }
    return stream;
}

// Normed states and logits over the draft vocabulary of the slots that predict a level.
static Slots predict(const BlockHead& head, const Roots& roots, int64_t num_slots, const float* stream, Room& at) {
    int64_t size = head.layers[0].hidden, vocab = head.logits.columns, num_levels = roots.num_levels;
    int64_t num_rows = roots.num_reqs * num_levels;
    float *normed = room(at.features, num_rows * size), *logits = room(at.logits, num_rows * vocab);
    by_row(num_rows, size, [&](int64_t row) {
        int64_t from = row / num_levels * num_slots + head.first_slot + row % num_levels;
        norm_or_copy(head.output_norm, stream + from * size, size, normed + row * size);
    });
    products(normed, size, num_rows, size, &head.logits, 1, nullptr, nullptr, 0, logits, vocab);
    float cap = head.logit_softcap;
    if (head.logit_scale != 1 || cap > 0)
        by_row(num_rows, vocab, [&](int64_t row) {
            for (int64_t i = 0; i < vocab; i += LANES) {
                vec score = load_upto(logits + row * vocab + i, vocab - i) * head.logit_scale;
                if (cap > 0) score = cap * hyperbolic_tangent(score / cap);
                store_upto(logits + row * vocab + i, score, vocab - i);
            }
        });
    return {normed, logits};
}

// Grows a tree from each root. Returns the number of levels grown.
static int64_t grow(const BlockHead& head, const Sequences& all, const Roots& roots, Room& at) {
    reserve(all, roots, at);
    int64_t num_slots = slots_run(head, roots);
    Slots slots = predict(head, roots, num_slots, run_block(head, all, roots, num_slots, at), at);
    const Markov* markov = head.markov.rank || head.markov.confidence.weight ? &head.markov : nullptr;
    const Lattice* lattice = head.lattice.num_candidates ? &head.lattice : nullptr;
    Walk walk{markov, lattice, head.draft_token_ids, head.layers[0].hidden, head.logits.columns};
    return grow_by(walk, slots, roots, at);
}
