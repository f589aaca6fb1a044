// What a verifier makes of drafted trees on the host before they are rows: which it believes, and which of their nodes
// are worth verifying.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

// TreeColumns by the row, [num_reqs, num_nodes]; column 0 holds the roots.
struct TreeColumns {
    int64_t *token_ids, *parents, *depths;
    float* scores;
    int64_t* num_valid;  // [num_reqs]
};

// A drafter's answer as it lies, and where sequences really are; by slot what has no other size.
struct Answer {
    int64_t num_reqs, num_nodes;
    const int64_t* slots;  // [num_reqs]
    const bool* wanted;    // [num_reqs]
    TreeColumns trees;           // [num_slots, num_nodes]
    const int64_t *epochs, *committed_lens;  // that they were grown for
    const int64_t *own_epochs, *own_lens, *last_token_ids;
    int64_t vocab, chains;  // `chains`: each node follows the one before it
};

// Whether parents precede children, depths follow from them and tokens exist, of the nodes that count.
static bool well_formed(const Answer& from, const TreeColumns& tree, int64_t first, int64_t count) {
    const int64_t *token_ids = tree.token_ids + first, *parents = tree.parents + first, *depths = tree.depths + first;
    if (count < 1 || count > from.num_nodes || parents[0] != -1 || depths[0] != 0) return false;
    for (int64_t node = 0; node < count; node++) {
        if (token_ids[node] < 0 || token_ids[node] >= from.vocab) return false;
        if (!node) continue;
        if (parents[node] < (from.chains ? node - 1 : 0) || parents[node] >= node) return false;
        if (depths[node] != depths[parents[node]] + 1) return false;
    }
    return true;
}

// As `runtime/round/tree_check.py` has it: trees of decodes, bare roots where an answer does not count. Returns the most
// nodes of any, 0 where none counts. What is checked is the copy: the memory that it came in is the drafter's, too.
static int64_t check_trees(const Answer& from, const TreeColumns& into) {
    int64_t most = 0;
    for (int64_t req = 0; req < from.num_reqs; req++) {
        int64_t slot = from.slots[req], source = slot * from.num_nodes, target = req * from.num_nodes;
        int64_t count = from.trees.num_valid[slot];
        const int64_t* sent[] = {from.trees.token_ids, from.trees.parents, from.trees.depths};
        int64_t* columns[] = {into.token_ids, into.parents, into.depths};
        for (int column = 0; column < 3; column++)
            std::copy_n(sent[column] + source, from.num_nodes, columns[column] + target);
        std::copy_n(from.trees.scores + source, from.num_nodes, into.scores + target);
        bool usable = from.wanted[req] && from.epochs[slot] == from.own_epochs[slot] &&
                      from.committed_lens[slot] == from.own_lens[slot] && well_formed(from, into, target, count) &&
                      into.token_ids[target] == from.last_token_ids[slot];
        into.num_valid[req] = usable ? count : 1;
        int64_t kept = usable ? count : 0;
        most = std::max(most, kept);
        for (int64_t* column : columns) std::fill_n(column + target + kept, from.num_nodes - kept, 0);
    }
    return most;
}

// What nodes are chosen by, and what is left of it; as `runtime/speculation` has both.
struct Choice {
    int64_t num_reqs, num_nodes, max_depth;
    const int64_t* kinds;   // [num_reqs], row of the table
    const int64_t* useful;  // [num_reqs], levels that could still be emitted
    const bool* forced;     // [num_reqs], all of whose useful nodes stay; or null
    const double* table;    // [2, num_bins], acceptance by bin of the confidence
    int64_t num_bins;
    const double* edges;    // [num_bins - 1], ascending
    const double* price;    // [num_reqs * num_nodes], in tokens: of a pass with so many drafted nodes; null: all stay
    float* log_probs;       // [num_reqs, num_nodes], out: given the parent
    bool *real, *kept;      // likewise: drafted nodes that count, and those to verify
    double* path;           // likewise: P(a node and its ancestors are accepted)
};

constexpr float NO_CONFIDENCE = -50.0f;

static void weigh(const Choice& choice, const TreeColumns& trees) {
    for (int64_t req = 0; req < choice.num_reqs; req++) {
        int64_t first = req * choice.num_nodes;
        const double* row = choice.table + choice.kinds[req] * choice.num_bins;
        choice.real[first] = false, choice.log_probs[first] = NO_CONFIDENCE, choice.path[first] = 1.0;
        for (int64_t node = 1; node < choice.num_nodes; node++) {
            int64_t at = first + node, parent = first + std::max<int64_t>(trees.parents[at], 0);
            bool real = node < trees.num_valid[req] && trees.depths[at] <= choice.max_depth;
            float given = real ? trees.scores[at] - trees.scores[parent] : NO_CONFIDENCE;
            given = std::fmin(std::fmax(given, NO_CONFIDENCE), 0.0f);
            int64_t bin = std::lower_bound(choice.edges, choice.edges + choice.num_bins - 1, (double)given) - choice.edges;
            choice.real[at] = real;
            choice.log_probs[at] = given;
            choice.path[at] = real ? row[bin] * choice.path[parent] : 0.0;
        }
    }
}

// The best nodes of all trees together, as many as are worth their price; in a tree a child is no likelier than its parent.
static void take_best(const Choice& choice, const TreeColumns& trees) {
    static thread_local std::vector<int64_t> order;
    order.clear();
    int64_t all = choice.num_reqs * choice.num_nodes;
    for (int64_t at = 0; at < all; at++) {
        bool within = choice.real[at] && trees.depths[at] <= choice.useful[at / choice.num_nodes];
        choice.kept[at] = within && (!choice.price || (choice.forced && choice.forced[at / choice.num_nodes]));
        if (within) order.push_back(at);
    }
    if (!choice.price) return;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return choice.path[a] > choice.path[b]; });
    double gain = 0.0, most = -choice.price[0];
    int64_t best = 0;
    for (int64_t count = 1; count <= (int64_t)order.size(); count++) {
        gain += choice.path[order[count - 1]];
        if (gain - choice.price[count] > most) most = gain - choice.price[count], best = count;
    }
    for (int64_t i = 0; i < best; i++) choice.kept[order[i]] = true;
}

// The trees of their kept nodes alone, in their old order, [num_reqs, width]; returns the width, 1 where nothing stays.
static int64_t prune(const Choice& choice, const TreeColumns& trees, const TreeColumns& into) {
    int64_t width = 1;
    for (int64_t req = 0; req < choice.num_reqs; req++) {
        const bool* kept = choice.kept + req * choice.num_nodes;
        into.num_valid[req] = 1 + std::count(kept + 1, kept + choice.num_nodes, true);
        width = std::max(width, into.num_valid[req]);
    }
    static thread_local std::vector<int64_t> number;
    number.assign(choice.num_nodes, 0);
    for (int64_t req = 0; req < choice.num_reqs; req++) {
        int64_t first = req * choice.num_nodes, target = req * width, count = 0;
        for (int64_t node = 0; node < choice.num_nodes; node++) {
            int64_t at = first + node, parent = trees.parents[at];
            if (node && !choice.kept[at]) continue;
            number[node] = count;
            into.token_ids[target + count] = trees.token_ids[at];
            into.parents[target + count] = node ? number[std::max<int64_t>(parent, 0)] : -1;
            into.depths[target + count] = trees.depths[at];
            into.scores[target + count++] = trees.scores[at];
        }
        for (; count < width; count++) {
            into.token_ids[target + count] = into.parents[target + count] = into.depths[target + count] = 0;
            into.scores[target + count] = 0.0f;
        }
    }
    return width;
}

static int64_t choose_nodes(const Choice& choice, const TreeColumns& trees, const TreeColumns& into) {
    weigh(choice, trees);
    take_best(choice, trees);
    return prune(choice, trees, into);
}

// Where the rows of decodes lie; as `runtime/round/builder.py` has it.
struct Layout {
    int64_t num_reqs, num_nodes;
    const int64_t *slots, *depths, *num_valid;  // of the trees
    const int64_t *committed_lens, *last_token_ids;  // by slot
    const int64_t* block_tables;                 // [num_slots, num_blocks]
    int64_t num_blocks, block_size, last_position;
    int64_t* token_ids;                          // [num_reqs, num_nodes]; roots are filled in
    int64_t* roots;                              // [num_reqs], out: positions
    int64_t *positions, *mapping, *rows;         // [num_reqs, num_nodes], out
    int64_t *nodes, *row_ids, *row_positions, *row_mapping;  // [number of rows], out: the real nodes side by side
    int64_t* starts;                             // [num_reqs + 1], out
};

// Returns the number of rows.
static int64_t lay_out(const Layout& layout) {
    int64_t count = 0;
    for (int64_t req = 0; req < layout.num_reqs; req++) {
        int64_t slot = layout.slots[req], root = layout.committed_lens[slot] - 1, first = req * layout.num_nodes;
        const int64_t* table = layout.block_tables + slot * layout.num_blocks;
        layout.roots[req] = root;
        layout.token_ids[first] = layout.last_token_ids[slot];
        layout.starts[req] = count;
        for (int64_t node = 0; node < layout.num_nodes; node++) {
            int64_t at = first + node, stored = root + node;
            bool real = node < layout.num_valid[req];
            // Nodes past the last position are never accepted, but a table of positions has no row for them.
            layout.positions[at] = std::min(root + (real ? layout.depths[at] : 0), layout.last_position);
            int64_t block = std::clamp<int64_t>(stored / layout.block_size, 0, layout.num_blocks - 1);
            layout.mapping[at] = real ? table[block] * layout.block_size + stored % layout.block_size : 0;
            layout.rows[at] = std::max<int64_t>(real ? count : count - 1, 0);
            if (!real) continue;
            layout.nodes[count] = at;
            layout.row_ids[count] = layout.token_ids[at];
            layout.row_positions[count] = layout.positions[at];
            layout.row_mapping[count++] = layout.mapping[at];
        }
    }
    return layout.starts[layout.num_reqs] = count;
}
