// Applies a sequence's sampling rules to a draft head's scores before candidates are ranked: bias and bans, penalties
// for decided tokens, then top-k, top-p and min-p. Must agree with `runtime/draft_rules/request_rules.py`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

constexpr float NONE = -std::numeric_limits<float>::infinity();

// Rules by slot, laid out as in `runtime.protocol.sampling_rules`; null `numbers` mean that no slot has rules.
struct SamplingRules {
    const float* numbers;      // [num_slots, NUM_RULES]
    const int64_t* token_ids;  // [num_slots, MOST_BIASED], -1 after the listed tokens
    const float* biases;
};

enum Rule { TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, NUM_PROMPT_TOKENS, ONLY_LISTED, NUM_RULES };
constexpr int64_t MOST_BIASED = 64, MOST_TOKENS = 1 << 24;

// Rules of one sequence.
struct Ruled {
    const float* rules = nullptr;
    int64_t num_listed;
    std::vector<float> bias, less;  // by token: added bias, and the sum of subtracted penalties
    std::vector<char> seen;  // by token, bits: 1: in the sequence, 2: in its output
    std::vector<float> sorted;

    // `tokens` are the sequence's decided tokens; drafted tokens are not counted.
    void begin(const SamplingRules& all, int64_t slot, const int64_t* tokens, int64_t num_tokens) {
        rules = all.numbers ? all.numbers + slot * NUM_RULES : nullptr;
        num_listed = 0;
        if (!rules) return;
        const int64_t* ids = all.token_ids + slot * MOST_BIASED;
        while (num_listed < MOST_BIASED && ids[num_listed] >= 0) num_listed++;
        int64_t vocab = 1;  // size of the columns: highest token mentioned, plus 1
        for (int64_t i = 0; i < num_listed; i++) vocab = std::max(vocab, ids[i] + 1);
        for (int64_t i = 0; penalizes() && i < num_tokens; i++) vocab = std::max(vocab, tokens[i] + 1);
        vocab = std::min(vocab, MOST_TOKENS);
        if (num_listed) {
            bias.assign(vocab, rules[ONLY_LISTED] ? NONE : 0.0f);
            for (int64_t i = 0; i < num_listed; i++)
                if (ids[i] < vocab) bias[ids[i]] = all.biases[slot * MOST_BIASED + i];
        }
        if (!penalizes()) return;
        seen.assign(vocab, 0), less.assign(vocab, 0.0f);
        for (int64_t i = 0; i < num_tokens; i++) {
            int64_t token = tokens[i];
            if (token < 0 || token >= vocab) continue;
            seen[token] |= 1;
            if (i < rules[NUM_PROMPT_TOKENS]) continue;
            less[token] += rules[FREQUENCY] + (seen[token] & 2 ? 0.0f : rules[PRESENCE]);
            seen[token] |= 2;
        }
    }

    bool penalizes() const { return rules[REPETITION] != 1 || rules[PRESENCE] || rules[FREQUENCY]; }

    // Changes scores in place; excluded tokens get -infinity. `filters` is false for a head's own few candidates.
    void apply(const int64_t* token_ids, int64_t count, float temperature, bool filters, float* scores) {
        if (!rules) return;
        auto known = [](const auto& column, int64_t token) { return token < (int64_t)column.size(); };
        if (num_listed)
            for (int64_t i = 0; i < count; i++)
                scores[i] += known(bias, token_ids[i]) ? bias[token_ids[i]] : rules[ONLY_LISTED] ? NONE : 0.0f;
        if (penalizes())
            for (int64_t i = 0; i < count; i++) {
                int64_t token = token_ids[i];
                if (!known(seen, token) || !seen[token]) continue;
                scores[i] = (scores[i] > 0 ? scores[i] / rules[REPETITION] : scores[i] * rules[REPETITION]) - less[token];
            }
        if (filters && temperature > 0 && (rules[TOP_K] > 0 || rules[TOP_P] < 1 || rules[MIN_P] > 0)) filter(count, temperature, scores);
    }

    void filter(int64_t count, float temperature, float* scores) {
        // NaN becomes -infinity, because NaN cannot be sorted.
        for (int64_t i = 0; i < count; i++)
            if (std::isnan(scores[i])) scores[i] = NONE;
        float top = *std::max_element(scores, scores + count), least = NONE;
        if (top == NONE) return;
        if (rules[TOP_K] > 0 && rules[TOP_K] < count) {
            int64_t kth = (int64_t)rules[TOP_K] - 1;
            sorted.assign(scores, scores + count);
            std::nth_element(sorted.begin(), sorted.begin() + kth, sorted.end(), std::greater<float>());
            least = sorted[kth];
        }
        if (rules[TOP_P] < 1) least = std::max(least, edge_of_nucleus(count, temperature, scores, top, least));
        if (rules[MIN_P] > 0) least = std::max(least, top + temperature * std::log(rules[MIN_P]));
        for (int64_t i = 0; i < count; i++)
            if (scores[i] < least) scores[i] = NONE;
    }

    // Lowest score that top-p keeps: the least score of the smallest set of best scores whose mass is at least top-p
    // times the mass of all scores >= `least`.
    float edge_of_nucleus(int64_t count, float temperature, const float* scores, float top, float least) {
        float total = 0.0f, mass = 0.0f;
        sorted.clear();
        for (int64_t i = 0; i < count; i++) {
            if (scores[i] < least || scores[i] == NONE) continue;
            total += std::exp((scores[i] - top) / temperature);
            sorted.push_back(scores[i]);
        }
        // With a heap only the scores of the nucleus are sorted.
        std::make_heap(sorted.begin(), sorted.end());
        for (auto end = sorted.end(); end != sorted.begin(); --end) {
            std::pop_heap(sorted.begin(), end);
            mass += std::exp((*(end - 1) - top) / temperature);
            if (mass >= rules[TOP_P] * total) return *(end - 1);
        }
        return NONE;
    }
};
