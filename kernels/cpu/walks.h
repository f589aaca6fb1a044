// Candidate children of each node, from the slots of a block (as `runtime/one_pass/walks.py`): by the slot's
// logits alone, with a correction by the preceding token (DSpark), or among a few candidates scored with that token
// (DFlash2).
#pragma once

#include "growth.h"

// DSpark's correction of a slot's scores, and the head's confidence in the best token. Matrices without a weight are
// not used.
struct Markov {
    Embedding tokens;  // rows of `rank` numbers
    int64_t rank;      // 0: scores are left as they are
    Matrix scores;     // [rank, vocabulary]
    Matrix gate;       // [hidden + rank, rank]
    Matrix joint;      // [2 * rank + hidden, 3 * rank]: passes a recurrent state from token to token
    Matrix confidence;  // [hidden, 1], or [hidden + rank, 1] if it reads the token
    int64_t confidence_reads_token;
};

// DFlash2's candidates of a slot.
struct Lattice {
    Embedding predecessors, successors;  // rows of `rank` numbers
    Matrix projection;                   // [hidden, rank]
    int64_t rank, num_candidates;        // num_candidates 0: no lattice
};

struct Walk {
    const Markov* markov;    // or null
    const Lattice* lattice;  // or null
    const int64_t* draft_token_ids;
    int64_t hidden, vocab;
};

// Slots that predict a level, [num_reqs, num_levels, ..].
struct Slots {
    const float* hidden;
    float* logits;
};

static float dot(const float* a, const float* b, int64_t count) {
    vec sums = {};
    for (int64_t i = 0; i < count; i += LANES)
        sums = fused(load_upto(a + i, count - i), load_upto(b + i, count - i), sums);
    return sum(sums);
}

static vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }

// Sets the best token's probability to the confidence. The other tokens share the rest in proportion to their
// probabilities; none gets more than the best token.
static void be_sure(const Best& best, float confidence) {
    float sure = std::clamp(confidence, 1e-6f, 1 - 1e-6f), first = std::exp(best.kept[0].score);
    for (int64_t i = 0; i < best.count; i++) {
        float other = std::exp(best.kept[i].score) * (1 - sure) / std::max(1 - first, 1e-6f);
        best.kept[i].score = std::log(i ? std::min(other, sure) : sure);
    }
}

// Scores by which a slot's candidates are chosen: its logits under the sequence's rules, plus the target's noise.
// Without the noise a sampled token would rarely be among the candidates. `own` is a buffer for two rows of the
// vocabulary.
static const float* ranks_of(const Walk& walk, const float* logits, const Roots& roots, int64_t slot, float* own, Room& at) {
    int64_t tree = slot / roots.num_levels, level = slot % roots.num_levels, sequence = roots.slots[tree], vocab = walk.vocab;
    float temperature = roots.temperatures[sequence], *noise = own + vocab;
    Ruled& ruled = at.trees[tree].ruled;
    bool masked = roots.allowed && !level;
    if (!(temperature > 0) && !ruled.rules && !masked) return logits;
    memcpy(own, logits, vocab * sizeof(float));
    if (masked) allow_only(roots.allowed + tree * roots.allowed_words, walk.draft_token_ids, vocab, own);
    ruled.apply(walk.draft_token_ids, vocab, temperature, true, own);
    if (!(temperature > 0)) return own;
    gumbel({temperature, roots.seeds[sequence], roots.lens[sequence] + level}, walk.draft_token_ids, vocab, noise);
    for (int64_t i = 0; i < vocab; i += LANES) {
        int64_t left = vocab - i;
        store_upto(own + i, load_upto(own + i, left) / temperature + load_upto(noise + i, left), left);
    }
    return own;
}

// Selects each slot's best tokens as candidates, whose pairs with preceding tokens are scored later.
static void choose_candidates(const Walk& walk, const Slots& slots, const Roots& roots, Room& at) {
    const Lattice& lattice = *walk.lattice;
    int64_t count = lattice.num_candidates, num_slots = roots.num_reqs * roots.num_levels, rank = lattice.rank;
    int64_t* tokens = room(at.candidates, num_slots * count);
    // Per slot: its projection, its candidates' own scores, and their successor embeddings.
    int64_t width = rank + count + count * rank;
    float *all = room(at.factors, num_slots * width), *projected = room(at.inputs, num_slots * rank);
    room(at.best, num_slots * count);
    bool any_changed = roots.sampling.numbers || roots.allowed;
    for (int64_t tree = 0; tree < roots.num_reqs; tree++) any_changed |= roots.temperatures[roots.slots[tree]] > 0;
    float* ranked = room(at.noise, any_changed ? num_slots * 2 * walk.vocab : 0);
    products(slots.hidden, walk.hidden, num_slots, walk.hidden, &lattice.projection, 1, nullptr, nullptr, 0, projected, rank);
    auto choose = [&](int64_t slot) {
        Best best{at.best.data() + slot * count, count, 0};
        const float* logits = slots.logits + slot * walk.vocab;
        const float* ranks = ranks_of(walk, logits, roots, slot, ranked + slot * 2 * walk.vocab, at);
        best.offer(ranks, walk.vocab);
        float *own = all + slot * width, *scores = own + rank, *successors = scores + count;
        memcpy(own, projected + slot * rank, rank * sizeof(float));
        for (int64_t i = 0; i < count; i++) {
            int64_t index = best.kept[i].index, token = tokens[slot * count + i] = walk.draft_token_ids[index];
            scores[i] = ranks[index] == NONE ? NONE : logits[index];
            lattice.successors.read(token, rank, successors + i * rank);
        }
    };
    // A sequence's rules have scratch state, so one thread at a time applies them.
    if (!roots.sampling.numbers) return threads.share(num_slots, choose);
    threads.share(roots.num_reqs, [&](int64_t tree) {
        for (int64_t level = 0; level < roots.num_levels; level++) choose(tree * roots.num_levels + level);
    });
}

// Enters candidate children of the frontiers' nodes, chosen among each slot's candidates only.
static void follow_lattice(const Walk& walk, const Roots& roots, int64_t level, int64_t width, Room& at) {
    const Lattice& lattice = *walk.lattice;
    int64_t count = lattice.num_candidates, rank = lattice.rank, of_slot = rank + count + count * rank;
    int64_t num_reqs = roots.num_reqs, num_nodes = num_reqs * width;
    room(at.best, num_nodes * roots.top_k);
    float *noise = room(at.noise, num_reqs * count), *given = room(at.inputs, num_nodes * rank);
    float* scores = room(at.normed, num_nodes * count);
    threads.share(num_reqs, [&](int64_t tree) {
        int64_t slot = tree * roots.num_levels + level;
        const float *projected = at.factors.data() + slot * of_slot, *unary = projected + rank;
        Ranking ranking = Ranking::of(roots, tree, level, at.candidates.data() + slot * count, count,
                                      noise + tree * count, at, false);
        Table& table = at.trees[tree];
        for (int64_t node = 0; node < width; node++) {
            int64_t row = tree * width + node;
            float *before = given + row * rank, *own = scores + row * count;
            lattice.predecessors.read(table.token_ids[table.frontier[node].index], rank, before);
            for (int64_t i = 0; i < rank; i += LANES)
                store_upto(before + i, load_upto(before + i, rank - i) * load_upto(projected + i, rank - i), rank - i);
            for (int64_t i = 0; i < count; i++) own[i] = unary[i] + dot(before, unary + count + i * rank, rank);
            Best best{at.best.data() + row * roots.top_k, roots.top_k, 0};
            ranking.best_of(own, best);
            ranking.enter(best, node, table);
        }
    });
}

// Enters candidate children of the frontiers' nodes, regardless of the nodes' tokens.
static void follow_slots(const Walk& walk, const Slots& slots, const Roots& roots, int64_t level, int64_t width, Room& at) {
    int64_t vocab = walk.vocab;
    room(at.best, roots.num_reqs * roots.top_k);
    float* noise = room(at.noise, roots.num_reqs * vocab);
    threads.share(roots.num_reqs, [&](int64_t tree) {
        Ranking ranking = Ranking::of(roots, tree, level, walk.draft_token_ids, vocab, noise + tree * vocab, at);
        Best best{at.best.data() + tree * roots.top_k, roots.top_k, 0};
        ranking.best_of(slots.logits + (tree * roots.num_levels + level) * vocab, best);
        for (int64_t node = 0; node < width; node++) ranking.enter(best, node, at.trees[tree]);
    });
}

// Input rows of DSpark's matrix products. Each row concatenates the state of the preceding tokens, the token, the
// slot's hidden state, and the token again.
static float* markov_rows(const Walk& walk, const Slots& slots, const Roots& roots, int64_t level, int64_t width, Room& at) {
    const Markov& markov = *walk.markov;
    int64_t rank = markov.rank, hidden = walk.hidden, width_before = level > 1 ? roots.top_k : 1;
    float* rows = room(at.inputs, roots.num_reqs * width * (3 * rank + hidden));
    for (int64_t tree = 0; tree < roots.num_reqs; tree++) {
        const Table& table = at.trees[tree];
        for (int64_t node = 0; node < width; node++) {
            float *state = rows + (tree * width + node) * (3 * rank + hidden), *token = state + rank, *slot = token + rank;
            std::fill(state, token, 0.0f);
            if (level && markov.joint.weight)
                memcpy(state, at.states.data() + (tree * width_before + table.parent[node]) * rank, rank * sizeof(float));
            if (rank) markov.tokens.read(table.token_ids[table.frontier[node].index], rank, token);
            memcpy(slot, slots.hidden + (tree * roots.num_levels + level) * hidden, hidden * sizeof(float));
            memcpy(slot + hidden, token, rank * sizeof(float));
        }
    }
    return rows;
}

// Factors that the correction's last matrix multiplies, [num_rows, rank]. Advances the recurrent states.
static const float* markov_factors(const Walk& walk, const float* rows, int64_t num_rows, Room& at) {
    const Markov& markov = *walk.markov;
    int64_t rank = markov.rank, hidden = walk.hidden, wide = 3 * rank + hidden;
    float *factors = room(at.factors, num_rows * 4 * rank), *made = factors + num_rows * rank;
    float* states = room(at.states, num_rows * rank);
    const float *inputs = rows + 2 * rank, *joint = rows;
    if (markov.gate.weight)
        products(inputs, wide, num_rows, hidden + rank, &markov.gate, 1, nullptr, nullptr, 0, made, rank);
    if (markov.joint.weight)
        products(joint, wide, num_rows, 2 * rank + hidden, &markov.joint, 1, nullptr, nullptr, 0, made, 3 * rank);
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t i = 0; i < rank; i += LANES) {
            int64_t left = rank - i;
            vec factor = load_upto(rows + row * wide + rank + i, left);
            if (markov.gate.weight) factor *= sigmoid(load_upto(made + row * rank + i, left));
            if (markov.joint.weight) {
                const float* own = made + row * 3 * rank + i;
                vec gate = sigmoid(load_upto(own, left)), candidate = hyperbolic_tangent(load_upto(own + rank, left));
                store_upto(states + row * rank + i, gate * load_upto(rows + row * wide + i, left) + (1.0f - gate) * candidate, left);
                factor = hyperbolic_tangent(load_upto(own + 2 * rank, left));
            }
            store_upto(factors + row * rank + i, factor, left);
        }
    return factors;
}

// Enters candidate children of the frontiers' nodes, from the slots and the nodes' tokens.
static void follow_markov(const Walk& walk, const Slots& slots, const Roots& roots, int64_t level, int64_t width, Room& at) {
    const Markov& markov = *walk.markov;
    int64_t rank = markov.rank, vocab = walk.vocab, num_rows = roots.num_reqs * width, wide = 3 * rank + walk.hidden;
    const float* rows = markov_rows(walk, slots, roots, level, width, at);
    float *scores = room(at.before, num_rows * (vocab + 1)), *sure = scores + num_rows * vocab;
    if (rank)
        products(markov_factors(walk, rows, num_rows, at), rank, num_rows, rank, &markov.scores, 1, nullptr, nullptr, 0,
                 scores, vocab);
    else
        std::fill(scores, sure, 0.0f);
    if (markov.confidence.weight)
        products(rows + 2 * rank, wide, num_rows, walk.hidden + (markov.confidence_reads_token ? rank : 0),
                 &markov.confidence, 1, nullptr, nullptr, 0, sure, 1);
    room(at.best, num_rows * roots.top_k);
    float* noise = room(at.noise, roots.num_reqs * vocab);
    threads.share(roots.num_reqs, [&](int64_t tree) {
        Ranking ranking = Ranking::of(roots, tree, level, walk.draft_token_ids, vocab, noise + tree * vocab, at);
        const float* unary = slots.logits + (tree * roots.num_levels + level) * vocab;
        for (int64_t node = 0; node < width; node++) {
            int64_t row = tree * width + node;
            float* own = scores + row * vocab;
            for (int64_t i = 0; i < vocab; i += LANES)
                store_upto(own + i, load_upto(own + i, vocab - i) + load_upto(unary + i, vocab - i), vocab - i);
            Best best{at.best.data() + row * roots.top_k, roots.top_k, 0};
            ranking.best_of(own, best);
            if (markov.confidence.weight) be_sure(best, sigmoid(all(sure[row]))[0]);
            ranking.enter(best, node, at.trees[tree]);
        }
    });
}

// Grows a tree from each root, from the slots of its block. Returns the number of levels grown.
static int64_t grow_by(const Walk& walk, const Slots& slots, const Roots& roots, Room& at) {
    begin_trees(roots, at);
    if (walk.lattice) choose_candidates(walk, slots, roots, at);
    return grow_levels(roots, at, [&](int64_t level, int64_t width) {
        if (walk.lattice) follow_lattice(walk, roots, level, width, at);
        else if (walk.markov) follow_markov(walk, slots, roots, level, width, at);
        else follow_slots(walk, slots, roots, level, width, at);
    });
}
