// A verifier's intake of drafted trees on the host: checks them, selects the nodes worth verifying, and lays these out
// as rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "accept.h"

// Columns of trees, [num_reqs, num_nodes], row-major; column 0 holds the roots.
struct TreeColumns {
    int64_t *token_ids, *parents, *depths;
    float* scores;
    int64_t* num_valid;  // [num_reqs]
};

// A drafter's reply, in the memory where the drafter wrote it, and the present state of the sequences. Arrays without a
// stated size are by slot.
struct Answer {
    int64_t num_reqs, num_nodes;
    const int64_t* slots;  // [num_reqs]
    const bool* wanted;    // [num_reqs]: a tree was requested
    TreeColumns trees;           // [num_slots, num_nodes]; null: bare roots
    const int64_t *epochs, *committed_lens;  // state that the trees were grown for; `own_*`: present state
    const int64_t *own_epochs, *own_lens, *last_token_ids;
    int64_t vocab, chains;  // non-zero `chains`: each node must follow the node before it
};

// True if, among the first `count` nodes, parents precede children, depths follow from parents, and tokens exist.
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

// Copies one tree per decode into `into`, or a bare root if the reply has no usable tree for the decode (as in
// `runtime/round/tree_check.py`). Returns the maximum number of nodes of a tree, 0 if no tree is usable. The copies are
// checked, not the reply, because the drafter can still write to the memory of its reply.
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

// Parameters of node selection (`runtime/adaptive`); without a table all nodes are kept.
struct Choice {
    int64_t max_depth;
    const int64_t* kinds;       // [num_reqs], rows of `table`
    const int64_t* useful;      // [num_reqs], levels that could still be emitted
    const int64_t* forced;      // [num_reqs], non-zero: all useful nodes of the tree are kept
    const double* table;        // [num_kinds, num_bins], acceptance rate by bin of confidence; or null
    const double* edges;        // [num_bins - 1], ascending
    int64_t num_bins;
    // [num_reqs * num_nodes or more], cost in tokens of a pass with that many nodes; null: all are kept
    const double* price;
};

// Row layout of decodes, as in `runtime/round/builder.py`.
struct Layout {
    const int64_t* block_tables;  // [slots, num_blocks]
    int64_t num_blocks, block_size, last_position;
    int64_t shows_ancestors;      // non-zero: ancestor words are computed for the nodes
};

// Input of `take_trees`. If `answer.epochs` is null, the trees have been checked and are stored by request.
struct Intake {
    Answer answer;
    Choice choice;
    Layout layout;
};

// Sizes of the results of `take_trees`.
struct Taken {
    int64_t is_usable;     // 0 if no tree is usable
    int64_t width;         // maximum number of kept nodes; 1 if only roots are left
    int64_t num_rows;      // kept nodes of all trees, without padding
    int64_t num_blocks;    // columns of the block tables
    int64_t num_drafting;  // trees that had a drafted node
    int64_t levels;        // depth of the deepest drafted node
};

constexpr float NO_CONFIDENCE = -50.0f;

// Evidence about a node in one word, as in `runtime/adaptive/acceptance.py`: log-probability given the parent,
// parent, depth, two flags.
struct Evidence {
    static constexpr int PARENT = 32, DEPTH = 47, REAL = 61, KEPT = 62;
    int64_t word;

    static Evidence of(float given, int64_t parent, int64_t depth, bool real, bool kept) {
        uint32_t bits;
        memcpy(&bits, &given, sizeof bits);
        return {(int64_t)bits | parent << PARENT | depth << DEPTH | (int64_t)real << REAL | (int64_t)kept << KEPT};
    }
};

static int64_t bin_of(const double* edges, int64_t num_bins, float given) {
    return std::lower_bound(edges, edges + num_bins - 1, (double)given) - edges;
}

// Node selection state of all trees, [num_reqs, num_nodes].
struct Chooser {
    std::vector<float> given;  // log-probability given the parent
    std::vector<double> path;  // P(a node and its ancestors are accepted)
    std::vector<char> real, kept;
    std::vector<int64_t> order, number;

    void choose(const Intake& from, const TreeColumns& trees) {
        int64_t num_nodes = from.answer.num_nodes, all = from.answer.num_reqs * num_nodes;
        kept.assign(all, false);
        if (!from.choice.table) {
            for (int64_t at = 0; at < all; at++) kept[at] = at % num_nodes && at % num_nodes < trees.num_valid[at / num_nodes];
            return;
        }
        given.resize(all), path.resize(all), real.resize(all);
        for (int64_t req = 0; req < from.answer.num_reqs; req++) weigh(from, trees, req);
        take_best(from, trees);
    }

    void weigh(const Intake& from, const TreeColumns& trees, int64_t req) {
        const Choice& choice = from.choice;
        int64_t first = req * from.answer.num_nodes;
        const double* row = choice.table + choice.kinds[req] * choice.num_bins;
        real[first] = false, given[first] = NO_CONFIDENCE, path[first] = 1.0;
        for (int64_t node = 1; node < from.answer.num_nodes; node++) {
            int64_t at = first + node, parent = first + std::max<int64_t>(trees.parents[at], 0);
            real[at] = node < trees.num_valid[req] && trees.depths[at] <= choice.max_depth;
            float step = real[at] ? trees.scores[at] - trees.scores[parent] : NO_CONFIDENCE;
            given[at] = std::fmin(std::fmax(step, NO_CONFIDENCE), 0.0f);
            path[at] = real[at] ? row[bin_of(choice.edges, choice.num_bins, given[at])] * path[parent] : 0.0;
        }
    }

    // Ranks the nodes of all trees together, and keeps the number of best nodes that maximises expected accepted tokens
    // less the price. A child is never likelier than its parent, so the kept nodes form trees.
    void take_best(const Intake& from, const TreeColumns& trees) {
        const Choice& choice = from.choice;
        int64_t num_nodes = from.answer.num_nodes;
        order.clear();
        for (int64_t at = 0; at < (int64_t)real.size(); at++) {
            bool within = real[at] && trees.depths[at] <= choice.useful[at / num_nodes];
            kept[at] = within && (!choice.price || choice.forced[at / num_nodes]);
            if (within) order.push_back(at);
        }
        if (!choice.price) return;
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return path[a] > path[b]; });
        double gain = 0.0, most = -choice.price[0];
        int64_t best = 0;
        for (int64_t count = 1; count <= (int64_t)order.size(); count++) {
            gain += path[order[count - 1]];
            if (gain - choice.price[count] > most) most = gain - choice.price[count], best = count;
        }
        for (int64_t i = 0; i < best; i++) kept[order[i]] = true;
    }

    int64_t num_kept(int64_t req, int64_t num_nodes) const {
        return std::count(kept.begin() + req * num_nodes, kept.begin() + (req + 1) * num_nodes, (char)true);
    }
};

// Splits a buffer into consecutive parts.
struct Parts {
    int64_t* next;

    int64_t* take(int64_t count) { return std::exchange(next, next + count); }
};

// Trees pruned to their kept nodes, in the original order, with their storage. [num_reqs, width] except num_valid and
// roots [num_reqs]. Root tokens are the sequences' present last tokens.
struct Placed {
    int64_t *num_valid, *roots, *token_ids, *parents, *depths, *positions, *mapping, *rows;
    float* scores;  // float32, at the start of a part of 64-bit elements

    Placed(Parts& parts, int64_t num_reqs, int64_t width)
        : num_valid(parts.take(num_reqs)), roots(parts.take(num_reqs)), token_ids(parts.take(num_reqs * width)),
          parents(parts.take(num_reqs * width)), depths(parts.take(num_reqs * width)),
          positions(parts.take(num_reqs * width)), mapping(parts.take(num_reqs * width)),
          rows(parts.take(num_reqs * width)), scores((float*)parts.take(num_reqs * width)) {}
};

static void prune(const Intake& from, const TreeColumns& trees, Chooser& chosen, int64_t width, const Placed& into) {
    int64_t num_nodes = from.answer.num_nodes;
    chosen.number.assign(num_nodes, 0);
    for (int64_t req = 0; req < from.answer.num_reqs; req++) {
        int64_t first = req * num_nodes, target = req * width, count = 0;
        for (int64_t node = 0; node < num_nodes; node++) {
            int64_t at = first + node;
            if (node && !chosen.kept[at]) continue;
            chosen.number[node] = count;
            into.token_ids[target + count] = node ? trees.token_ids[at] : from.answer.last_token_ids[from.answer.slots[req]];
            into.parents[target + count] = node ? chosen.number[std::max<int64_t>(trees.parents[at], 0)] : -1;
            into.depths[target + count] = trees.depths[at];
            into.scores[target + count++] = trees.scores[at];
        }
        into.num_valid[req] = count;
        for (; count < width; count++) {
            into.token_ids[target + count] = into.parents[target + count] = into.depths[target + count] = 0;
            into.scores[target + count] = 0.0f;
        }
    }
}

// Kept nodes of all trees as consecutive rows, without padding.
struct SideBySide {
    int64_t *starts, *nodes, *token_ids, *positions, *mapping;  // [num_reqs + 1], and [num_rows] each

    SideBySide(Parts& parts, int64_t num_reqs, int64_t num_rows)
        : starts(parts.take(num_reqs + 1)), nodes(parts.take(num_rows)), token_ids(parts.take(num_rows)),
          positions(parts.take(num_rows)), mapping(parts.take(num_rows)) {}
};

static void lay_out(const Intake& from, int64_t width, const Placed& trees, const SideBySide& rows) {
    const Layout& layout = from.layout;
    int64_t count = 0;
    for (int64_t req = 0; req < from.answer.num_reqs; req++) {
        int64_t slot = from.answer.slots[req], root = from.answer.own_lens[slot] - 1, first = req * width;
        const int64_t* table = layout.block_tables + slot * layout.num_blocks;
        trees.roots[req] = root;
        rows.starts[req] = count;
        for (int64_t node = 0; node < width; node++) {
            int64_t at = first + node, stored = root + node;
            bool real = node < trees.num_valid[req];
            // Positions are clamped, because the table of rotary angles ends at the last position. Nodes past it are
            // never accepted.
            trees.positions[at] = std::min(root + (real ? trees.depths[at] : 0), layout.last_position);
            int64_t block = std::clamp<int64_t>(stored / layout.block_size, 0, layout.num_blocks - 1);
            trees.mapping[at] = real ? table[block] * layout.block_size + stored % layout.block_size : 0;
            trees.rows[at] = std::max<int64_t>(real ? count : count - 1, 0);
            if (!real) continue;
            rows.nodes[count] = at;
            rows.token_ids[count] = trees.token_ids[at];
            rows.positions[count] = trees.positions[at];
            rows.mapping[count++] = trees.mapping[at];
        }
    }
    rows.starts[from.answer.num_reqs] = count;
}

// Checks trees, selects the nodes to verify and lays them out. Writes consecutively to `out`: the evidence [num_reqs,
// num_nodes] if nodes are selected, the parts of `Placed` and `SideBySide`, and ancestor words [num_reqs, width, words]
// if `shows_ancestors`. Copies the block tables, as far as they are read, to rows of `tables`.
static Taken take_trees(const Intake& from, int64_t* out, int64_t* tables) {
    static thread_local std::vector<int64_t> numbers;
    static thread_local std::vector<float> scores;
    static thread_local Chooser chooser;
    const Answer& answer = from.answer;
    int64_t num_reqs = answer.num_reqs, num_nodes = answer.num_nodes, all = num_reqs * num_nodes;
    int64_t believed = 1;
    TreeColumns trees = answer.trees;
    if (!trees.token_ids) {
        numbers.assign(2 * all, 0), numbers.resize(2 * all + num_reqs, 1), scores.assign(all, 0.0f);
        trees = {&numbers[0], &numbers[0], &numbers[all], &scores[0], &numbers[2 * all]};
    } else if (answer.epochs) {
        numbers.resize(3 * all + num_reqs), scores.resize(all);
        trees = {&numbers[0], &numbers[all], &numbers[2 * all], &scores[0], &numbers[3 * all]};
        believed = check_trees(answer, trees);
    }
    chooser.choose(from, trees);
    Taken taken = {believed > 0, 1, 0, 0, 0, 0};
    for (int64_t req = 0; req < num_reqs; req++) {
        int64_t count = 1 + chooser.num_kept(req, num_nodes), stored = answer.own_lens[answer.slots[req]] - 1;
        taken.width = std::max(taken.width, count);
        taken.num_rows += count;
        taken.num_blocks = std::max(taken.num_blocks, stored);
        taken.num_drafting += trees.num_valid[req] > 1;
        for (int64_t node = 0; node < trees.num_valid[req]; node++)
            taken.levels = std::max(taken.levels, trees.depths[req * num_nodes + node]);
    }
    // Blocks of the longest sequence, its nodes included.
    taken.num_blocks = (taken.num_blocks + taken.width + from.layout.block_size - 1) / from.layout.block_size;
    taken.num_blocks = std::min(taken.num_blocks, from.layout.num_blocks);
    Parts parts = {out};
    if (from.choice.table) {
        int64_t* evidence = parts.take(all);
        for (int64_t at = 0; at < all; at++)
            evidence[at] = Evidence::of(chooser.given[at], std::max<int64_t>(trees.parents[at], 0),
                                        std::min(trees.depths[at], from.choice.max_depth), chooser.real[at],
                                        chooser.kept[at]).word;
    }
    Placed placed(parts, num_reqs, taken.width);
    prune(from, trees, chooser, taken.width, placed);
    lay_out(from, taken.width, placed, SideBySide(parts, num_reqs, taken.num_rows));
    for (int64_t req = 0, stride = from.layout.num_blocks; req < num_reqs; req++)
        std::copy_n(from.layout.block_tables + answer.slots[req] * stride, taken.num_blocks, tables + req * stride);
    int64_t num_words = (taken.width + 63) / 64;
    if (from.layout.shows_ancestors)
        ancestors(placed.parents, num_reqs, taken.width, num_words, parts.take(num_reqs * taken.width * num_words));
    return taken;
}
