// Draft trees, level by level: candidate children of each node, selection of the nodes to expand, and finally of the
// best nodes. Must agree with `kernels/tree/candidates.py` and `kernels/tree/table.py`; ties go to the lower index.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "sampling_rules.h"
#include "vectors.h"

struct Scored {
    float score;
    int64_t index;
};

// Keeps the best `most` of the scores offered in ascending order of index, best first.
struct Best {
    Scored* kept;
    int64_t most, count;

    void offer(float score, int64_t index) {
        if (count == most && !(score > kept[count - 1].score)) return;
        int64_t at = count < most ? count++ : count - 1;
        for (; at > 0 && score > kept[at - 1].score; at--) kept[at] = kept[at - 1];
        kept[at] = {score, index};
    }

    // Offers a register of scores, from `index` on.
    void offer(vec scores, int64_t index) {
        if (count == most && !any(scores > all(kept[count - 1].score))) return;
        for (int64_t lane = 0; lane < LANES; lane++) offer(scores[lane], index + lane);
    }

    // Offers a row of scores.
    void offer(const float* scores, int64_t number) {
        int64_t whole = number / LANES * LANES;
        for (int64_t i = 0; i < whole; i += LANES) offer(load(scores + i), i);
        for (int64_t i = whole; i < number; i++) offer(scores[i], i);
    }
};

// Temperature and noise seed of a request's target choice.
struct Noise {
    float temperature;
    int64_t seed, position;
};

static inline words triple32(words x) {
    x = (x ^ x >> 17) * 0xed5ad4bbu;
    x = (x ^ x >> 11) * 0xac4c1b51u;
    x = (x ^ x >> 15) * 0x31848babu;
    return x ^ x >> 14;
}

static inline uint32_t row_key(const Noise& noise, uint32_t lane) {
    auto mixed = [](uint32_t x) { return triple32(x - words{})[0]; };
    return mixed(mixed(mixed((uint32_t)noise.seed ^ lane) ^ (uint32_t)(noise.seed >> 32)) ^ (uint32_t)noise.position);
}

// The 23 random bits of some tokens, from their row's two keys, as in `kernels.sampling.noise`.
static inline words noise_bits(words tokens, uint32_t first, uint32_t second) {
    words x = triple32(tokens ^ 0xc2b2ae35u) ^ first;
    x = (x ^ x >> 17) * 0xed5ad4bbu;
    x = ((x ^ x >> 11) + second) * 0xac4c1b51u;
    x = (x ^ x >> 15) * 0x31848babu;
    return x >> 9;
}

// Standard Gumbel noise by token, as in `kernels.sampling.noise` except for the logarithms' last bits.
struct Gumbel {
    uint32_t first, second;

    explicit Gumbel(const Noise& noise) : first(row_key(noise, 0x9e3779b9u)), second(row_key(noise, 0x85ebca6bu)) {}

    vec of(words tokens) const {
        vec uniform = (__builtin_convertvector((ints)noise_bits(tokens, first, second), vec) + 0.5f) * 0x1p-23f;
        return -natural_logarithm(-natural_logarithm(uniform));
    }
};

static void gumbel(const Noise& noise, const int64_t* token_ids, int64_t count, float* out) {
    Gumbel by_token(noise);
    for (int64_t i = 0; i < count; i += LANES) {
        words x = {};
        int64_t lanes = std::min(LANES, count - i);
        for (int64_t lane = 0; lane < lanes; lane++) x[lane] = (uint32_t)token_ids[i + lane];
        store_upto(out + i, by_token.of(x), count - i);
    }
}

// Sets logits of tokens that are not allowed to -infinity. If no token is allowed, changes nothing.
static void allow_only(const int32_t* allowed, const int64_t* token_ids, int64_t count, float* logits) {
    auto may = [=](int64_t i) { return allowed[token_ids[i] / 32] >> (token_ids[i] % 32) & 1; };
    bool any = false;
    for (int64_t i = 0; i < count && !any; i++) any = may(i);
    for (int64_t i = 0; any && i < count; i++)
        if (!may(i)) logits[i] = NONE;
}

// Highest score of a row, and the logarithm of the sum of e^(score - top).
struct Likeliest {
    float top, log_sum;
};

// Selects the likeliest columns of a row, best first.
static Likeliest likeliest(const float* scores, int64_t count, Best& best) {
    vec most = all(NONE);
    int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) most = larger(load(scores + i), most);
    float top = largest(most);
    for (int64_t i = whole; i < count; i++) top = std::max(top, scores[i]);
    vec sums = {};
    for (int64_t i = 0; i < whole; i += LANES) {
        vec some = load(scores + i);
        sums += exponential(some - top);
        best.offer(some, i);
    }
    float total = sum(sums);
    for (int64_t i = whole; i < count; i++) {
        total += std::exp(scores[i] - top);
        best.offer(scores[i], i);
    }
    return {top, std::log(total)};
}

// Stopping rule of some trees, as `runtime.adaptive.growth_rule.AcceptanceRule`.
struct GrowthRule {
    int64_t begin, end;     // range of trees
    double min_reach, price;
    const float* table;     // [end - begin, num_bins]: acceptance rate by bin of confidence
    int64_t by_kind;        // non-zero: the table is [2, num_bins], for greedy and for sampled trees
};

struct GrowthRules {
    const GrowthRule* rules;
    int64_t num_rules, num_bins;
    const double* edges;  // [num_bins - 1], ascending

    double given_parent(const float* row, float log_prob) const {
        return row[std::lower_bound(edges, edges + num_bins - 1, (double)log_prob) - edges];
    }
};

// All candidates of one growing tree; entry 0 is the root.
struct Table {
    int64_t top_k, size;
    std::vector<int64_t> token_ids, parents, depths;
    std::vector<float> scores, log_probs;  // scores: cumulative log-probability; log_probs: of a token given its parent
    std::vector<double> paths;             // P(an entry and its ancestors are accepted)
    std::vector<Scored> frontier;          // entries that are expanded next, best first
    std::vector<uint64_t> visible;         // [top_k, num_words]: expanded nodes that each frontier node sees
    std::vector<int64_t> parent;           // index of each node's parent in the previous frontier
    std::vector<Scored> chosen;            // buffer for the next frontier
    std::vector<uint64_t> seen;
    Ruled ruled;  // sampling rules of the tree's sequence

    void begin(int64_t top_k_, int64_t root) {
        top_k = top_k_, size = 1;
        for (auto* column : {&token_ids, &parents, &depths}) column->assign(1, 0);
        token_ids[0] = root, parents[0] = -1;
        scores.assign(1, 0.0f), log_probs.assign(1, 0.0f), paths.assign(1, 1.0);
        frontier.assign(1, {0.0f, 0});
        visible.clear();
    }

    void enter(int64_t above, int64_t token_id, float log_prob) {
        float given = std::isnan(log_prob) ? NONE : std::min(log_prob, 0.0f);
        token_ids.push_back(token_id), parents.push_back(above), depths.push_back(depths[above] + 1);
        scores.push_back(scores[above] + given), log_probs.push_back(log_prob), paths.push_back(0.0);
        size++;
    }

    // Selects the new frontier, to be expanded as level `level`: the best entries among those from `first` on.
    void choose(int64_t first, int64_t level, int64_t num_words) {
        chosen.resize(top_k);
        Best best{chosen.data(), top_k, 0};
        for (int64_t i = first; i < size; i++) best.offer(scores[i], i);
        seen.assign(top_k * num_words, 0);
        parent.assign(top_k, 0);
        for (int64_t node = 0; node < top_k; node++) {
            if (level > 1) {
                parent[node] = (chosen[node].index - first) / top_k;
                memcpy(&seen[node * num_words], &visible[parent[node] * num_words], num_words * sizeof(uint64_t));
            }
            int64_t own = (level - 1) * top_k + node;
            seen[node * num_words + own / 64] |= 1ull << own % 64;
        }
        frontier.swap(chosen), visible.swap(seen);
    }

    // Sum over the frontier's nodes of the path probability minus the rule's price, where that is positive. `row`
    // [num_bins] holds acceptance rates.
    double worth(const GrowthRules& rules, const GrowthRule& rule, const float* row) {
        double mass = 0.0;
        for (const Scored& node : frontier) {
            double given = rules.given_parent(row, log_probs[node.index]);
            paths[node.index] = paths[parents[node.index]] * given;
            mass += std::max(paths[node.index] - rule.price, 0.0);
        }
        return mass;
    }
};

// Output buffers of trees, [.., num_nodes]; node 0 is the root.
struct Trees {
    int64_t *token_ids, *parents, *depths;
    float* scores;
    int64_t* num_valid;
    int64_t num_nodes;

    // Writes the best entries of a table in table order, renumbered. Padding has token, parent and depth 0 and score
    // -infinity.
    void write(const Table& table, int64_t to) const {
        int64_t num_kept = std::min(num_nodes, table.size) - 1;
        static thread_local std::vector<int64_t> order, number;
        order.resize(table.size - 1), number.assign(table.size, 0);
        for (int64_t i = 0; i < table.size - 1; i++) order[i] = i + 1;
        std::partial_sort(order.begin(), order.begin() + num_kept, order.end(), [&](int64_t a, int64_t b) {
            return table.scores[a] != table.scores[b] ? table.scores[a] > table.scores[b] : a < b;
        });
        while (num_kept > 0 && table.scores[order[num_kept - 1]] == NONE) num_kept--;
        std::sort(order.begin(), order.begin() + num_kept);
        for (int64_t node = 0; node < num_nodes; node++) {
            bool real = node <= num_kept;
            int64_t entry = node == 0 || !real ? 0 : order[node - 1], at = to * num_nodes + node;
            if (node && real) number[entry] = node;
            token_ids[at] = real ? table.token_ids[entry] : 0;
            parents[at] = !real ? 0 : node ? number[table.parents[entry]] : -1;
            depths[at] = real ? table.depths[entry] : 0;
            scores[at] = real ? table.scores[entry] : NONE;
        }
        num_valid[to] = 1 + num_kept;
    }
};
