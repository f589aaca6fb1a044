// The target's token per row: temperature, top-k, top-p, min-p and seeded noise, as in `kernels/sampling/reference.py`.
// Exponentials and logarithms differ from torch's in their last bits, so rows whose choice depends on those bits are
// left to torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "trees.h"
#include "vectors.h"

struct Sampling {
    const float* logits;  // [num_rows, vocab]
    int64_t num_rows, vocab;
    const float* temperatures;  // [num_rows] each
    const int64_t* top_ks;
    const float *top_ps, *min_ps;
    const int64_t *seeds, *positions;
    int64_t* tokens;  // out: [num_rows]
    bool* sure;       // out: [num_rows]; false where torch must choose instead
};

// Masses or scores that differ by less than this are left to torch; the difference of scores is relative to 1 + their
// magnitude.
constexpr double CLOSE = 2e-5;

struct RowChoice {
    std::vector<float> scaled, ranked, noise;
    std::vector<int64_t> ids;

    // True if no logit is NaN or +infinity, and at least one is above -infinity.
    static bool comparable(const float* logits, int64_t count) {
        bool any = false;
        for (int64_t i = 0; i < count; i++) {
            if (std::isnan(logits[i]) || logits[i] == -NONE) return false;
            any |= logits[i] != NONE;
        }
        return any;
    }

    bool choose(const Sampling& all, int64_t row, int64_t& token) {
        const float* logits = all.logits + row * all.vocab;
        float temperature = all.temperatures[row];
        if (!comparable(logits, all.vocab)) return false;
        if (!(temperature > 0)) return token = best_of(logits, all.vocab), true;
        scaled.resize(all.vocab);
        for (int64_t i = 0; i < all.vocab; i++) scaled[i] = logits[i] / temperature;
        float least = NONE;
        if (!edge(all, row, least)) return false;
        ids.clear(), ranked.clear();
        for (int64_t i = 0; i < all.vocab; i++)
            if (scaled[i] >= least && scaled[i] != NONE) ids.push_back(i), ranked.push_back(scaled[i]);
        int64_t count = ids.size();
        noise.resize(count);
        gumbel({temperature, all.seeds[row], all.positions[row]}, ids.data(), count, noise.data());
        for (int64_t i = 0; i < count; i++) ranked[i] += noise[i];
        int64_t best = best_of(ranked.data(), count);
        double margin = CLOSE * (1.0 + std::fabs(ranked[best]));
        for (int64_t i = 0; i < count; i++)
            if (i != best && ranked[best] - ranked[i] < margin) return false;
        token = ids[best];
        return true;
    }

    // Computes the least scaled logit that the filters keep. Returns false if a filter's edge is too close to decide.
    bool edge(const Sampling& all, int64_t row, float& least) {
        int64_t top_k = all.top_ks[row];
        double top_p = all.top_ps[row], min_p = all.min_ps[row];
        if (top_k <= 0 && top_p >= 1 && min_p <= 0) return true;
        if (top_k > 0 && top_k < all.vocab) {
            ranked = scaled;
            std::nth_element(ranked.begin(), ranked.begin() + top_k - 1, ranked.end(), std::greater<float>());
            least = ranked[top_k - 1];
        }
        float top = *std::max_element(scaled.begin(), scaled.end());
        if (top_p < 1 && !nucleus(top, top_p, least)) return false;
        if (min_p <= 0) return true;
        double below = top + std::log(min_p);
        for (float score : scaled)
            if (std::fabs(score - below) < CLOSE * (1.0 + std::fabs(top))) return false;
        least = std::max(least, (float)below);
        return true;
    }

    // Top-p among the tokens that top-k kept: a token is removed if its mass and that of all less likely tokens is at
    // most 1 - p.
    bool nucleus(float top, double top_p, float& least) {
        double total = 0.0, above = 0.0;
        ranked.clear();
        for (float score : scaled) {
            if (score < least || score == NONE) continue;
            total += std::exp((double)score - top);
            ranked.push_back(score);
        }
        std::make_heap(ranked.begin(), ranked.end());
        float before = top;
        for (auto end = ranked.end(); end != ranked.begin(); --end) {
            std::pop_heap(ranked.begin(), end);
            float score = *(end - 1);
            double rest = 1.0 - above / total;
            if (above > 0.0 && std::fabs(rest - (1.0 - top_p)) < CLOSE) return false;
            if (above > 0.0 && rest <= 1.0 - top_p) {
                // an edge within equal scores removes only some of them, which cannot be decided here
                if (score == before) return false;
                least = before;
                return true;
            }
            above += std::exp((double)score - top);
            before = score;
        }
        return true;
    }
};

static void choose_tokens(const Sampling& all) {
    static thread_local RowChoice rows;
    for (int64_t row = 0; row < all.num_rows; row++) {
        all.tokens[row] = 0;
        all.sure[row] = rows.choose(all, row, all.tokens[row]);
    }
}
