// Acceptance on the host: ancestor masks of draft trees, and the path along the target's choices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "trees.h"

// Forced acceptance, for benchmarks: a level is accepted if its random bits are below its limit. Must agree with
// `runtime/round/forced_acceptance.py`.
struct Forced {
    const int32_t* limits;  // [max_depth]; null if the target decides
    int64_t max_depth;
    const int64_t *epochs;  // by slot; seeds of the random bits
    const int64_t *roots;   // [num_reqs], positions of the roots

    int64_t levels(int64_t req, int64_t slot) const {
        Noise noise = {0.0f, epochs[slot], roots[req]};
        uint32_t first = row_key(noise, 0x9e3779b9u), second = row_key(noise, 0x85ebca6bu);
        for (int64_t level = 0; level < max_depth; level++)
            if ((int32_t)noise_bits((uint32_t)level - words{}, first, second)[0] >= limits[level]) return level;
        return max_depth;
    }
};

// Draft trees of one round, [num_reqs, num_nodes], row-major. A node's parent precedes the node; the root's is
// negative.
struct VerifiedTrees {
    int64_t num_reqs, num_nodes;
    // [num_reqs, num_nodes], [num_reqs, num_nodes], [num_reqs]; the last two are null if all trees are bare roots
    const int64_t *token_ids, *parents, *num_valid;
    const int64_t* rows;     // [num_reqs, num_nodes], row of each node in `targets` and `taps`; null: consecutive
    const int64_t* targets;  // [num_rows], token that the target chooses after each row; if null, argmax of `logits`
    const float* logits;     // [num_rows, vocab]
    int64_t vocab;
    const void* taps;        // [num_rows] of `tap_bytes` bytes each, or null
    int64_t tap_bytes;
    const int64_t* slots;    // [num_reqs]
    Forced forced;

    int64_t target(int64_t row) const { return targets ? targets[row] : best_of(logits + row * vocab, vocab); }
};

// Accepted paths, and the per-slot columns that the paths update.
struct Paths {
    int64_t longest, width;  // maximum number of nodes of a path; columns of `token_ids`
    int64_t *nodes;          // [num_reqs, longest], the last node repeated
    int64_t *token_ids;      // [num_reqs, width], 0 after the path
    int64_t *num_tokens;     // [num_reqs]
    void* taps;              // [num_reqs, longest] of `tap_bytes` bytes each, or null
    int64_t *committed_lens, *last_token_ids;  // by slot, updated in place
};

// Paged keys and values of all layers, in which accepted nodes are moved to their positions in the sequence.
struct Pools {
    int64_t count;  // number of pools; 0: no rows are moved
    char* const* data;
    const int64_t* row_bytes;  // by pool: bytes of a position
    const int64_t* tables;     // [num_slots, table_width]
    int64_t table_width, block_size;

    int64_t row(int64_t slot, int64_t position) const {
        int64_t block = std::clamp<int64_t>(position / block_size, 0, table_width - 1);
        return tables[slot * table_width + block] * block_size + position % block_size;
    }
    // Nodes of a path ascend and nodes[step] >= step, so a row is always read before it is overwritten.
    void compact(int64_t slot, int64_t root, const int64_t* nodes, int64_t num_nodes) const {
        for (int64_t step = 1; count && step < num_nodes; step++) {
            if (nodes[step] == step) continue;
            int64_t from = row(slot, root + nodes[step]), to = row(slot, root + step);
            for (int64_t pool = 0; pool < count; pool++)
                memcpy(data[pool] + to * row_bytes[pool], data[pool] + from * row_bytes[pool], row_bytes[pool]);
        }
    }
};

// Sets the bits of each node and its ancestors in words [num_reqs, num_nodes, num_words].
static void ancestors(const int64_t* parents, int64_t num_reqs, int64_t num_nodes, int64_t num_words, int64_t* words) {
    memset(words, 0, num_reqs * num_nodes * num_words * sizeof(int64_t));
    for (int64_t req = 0; req < num_reqs; req++, parents += num_nodes, words += num_nodes * num_words) {
        for (int64_t node = 0; node < num_nodes; node++) {
            int64_t* own = words + node * num_words;
            int64_t parent = std::max<int64_t>(parents[node], 0);
            if (parent < node) memcpy(own, words + parent * num_words, num_words * sizeof(int64_t));
            own[node / 64] |= (int64_t)(1ull << node % 64);
        }
    }
}

// Accepts a path per tree. Returns true if an accepted node is stored elsewhere than at its position in the sequence.
static bool accept(const VerifiedTrees& trees, const Paths& paths, const Pools& pools) {
    bool moved = false;
    for (int64_t req = 0; req < trees.num_reqs; req++) {
        int64_t first = req * trees.num_nodes, node = 0, count = 0, slot = trees.slots[req];
        const int64_t *token_ids = trees.token_ids + first, *parents = trees.parents ? trees.parents + first : nullptr;
        int64_t *nodes = paths.nodes + req * paths.longest, *emitted = paths.token_ids + req * paths.width;
        auto row_of = [&](int64_t index) { return trees.rows ? trees.rows[first + index] : first + index; };
        int64_t forced = trees.forced.limits ? trees.forced.levels(req, slot) : -1;
        for (int64_t end = trees.num_valid ? std::min(trees.num_valid[req], trees.num_nodes) : 1;;) {
            int64_t target = trees.target(row_of(node)), child = node + 1;
            auto is_child = [&] { return std::max<int64_t>(parents[child], 0) == node; };
            if (forced >= 0) {  // forced acceptance: the first child stands for the target's choice
                while (child < end && !is_child()) child++;
                if (count == forced) child = end;
                if (child < end) target = token_ids[child];
            }
            moved |= node != count;
            nodes[count] = node;
            emitted[count++] = target;
            if (count == paths.longest) break;
            // If several children carry the chosen token, the first is taken.
            while (child < end && (token_ids[child] != target || !is_child())) child++;
            if (child >= end) break;
            node = child;
        }
        pools.compact(slot, paths.committed_lens[slot] - 1, nodes, count);
        paths.num_tokens[req] = count;
        paths.committed_lens[slot] += count;
        paths.last_token_ids[slot] = emitted[count - 1];
        std::fill(nodes + count, nodes + paths.longest, node);
        std::fill(emitted + count, emitted + paths.width, 0);
        for (int64_t step = 0; paths.taps && step < paths.longest; step++)
            memcpy((char*)paths.taps + (req * paths.longest + step) * trees.tap_bytes,
                   (const char*)trees.taps + row_of(nodes[step]) * trees.tap_bytes, trees.tap_bytes);
    }
    return moved;
}
