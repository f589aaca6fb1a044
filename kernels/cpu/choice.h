// The target's token per row: temperature, top-k, top-p, min-p and seeded noise, as in `kernels/sampling/reference.py`.
// Exponentials and logarithms differ from torch's in their last bits. Rows whose best two tokens are closer than that
// are left to torch; top-p and min-p may end one token sooner or later than in torch if a mass is equal to their limit in
// all bits but the last.
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

// Scores that differ by less than this, relative to 1 + their magnitude, are left to torch.
constexpr double CLOSE = 2e-5;

// Bins by which a row's mass is summed to find where top-p ends; the tokens of one bin are sorted.
constexpr int64_t BINS = 4096;

// Up to this rank, top-k keeps a sorted list of the best.
constexpr int64_t FEW = 128;

// End of the tokens that the filters keep: all above `score`, and of those with this score the ids above `id`.
struct Edge {
    float score = NONE;
    int64_t id = -1;
};

struct RowChoice {
    // Logits over temperature, and -infinity up to a whole number of registers.
    std::vector<float> scaled;
    float top;
    std::vector<float> ranked, weights;
    std::vector<double> masses;
    std::vector<Scored> listed;

    bool choose(const Sampling& all, int64_t row, int64_t& token) {
        const float* logits = all.logits + row * all.vocab;
        float temperature = all.temperatures[row];
        if (!scale(logits, all.vocab, temperature > 0 ? temperature : 1.0f)) return false;
        if (!(temperature > 0)) return token = best_of(logits, all.vocab), true;
        return noisiest({temperature, all.seeds[row], all.positions[row]}, edge(all, row), token);
    }

    // Returns false if a logit is NaN, if one is infinite after scaling, or if all are -infinity.
    bool scale(const float* logits, int64_t vocab, float temperature) {
        scaled.resize((vocab + LANES - 1) / LANES * LANES);
        vec most = all(NONE);
        ints odd = {};
        for (int64_t i = 0; i < vocab; i += LANES) {
            int64_t left = vocab - i;
            vec some = load_upto(logits + i, left) / temperature;
            for (int64_t lane = left; lane < LANES; lane++) some[lane] = NONE;
            odd |= some != some;
            most = larger(some, most);
            store(&scaled[i], some);
        }
        top = largest(most);
        return !any(odd) && std::isfinite(top);
    }

    // The token whose score and noise are highest together; false if the second is too close to decide.
    bool noisiest(const Noise& noise, const Edge& edge, int64_t& token) {
        Gumbel by_token(noise);
        // noise of 23 bits is from -2.9 to 16.7, so no token this far below the best comes close to it
        float reach = top - 20.0f - (float)CLOSE * (20.0f + std::fabs(top)), least = std::max(edge.score, reach);
        vec best = all(NONE), second = all(NONE);
        words ids = {}, lanes;
        for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] = lane;
        for (size_t i = 0; i < scaled.size(); i += LANES) {
            vec score = load(&scaled[i]);
            if (!any(score >= least)) continue;
            words tokens = lanes + (uint32_t)i;
            ints kept = (score > edge.score) | ((score == edge.score) & ((ints)tokens > (int32_t)edge.id));
            score = kept ? score + by_token.of(tokens) : all(NONE);
            ints higher = score > best;
            second = larger(higher ? best : score, second);
            ids = higher ? tokens : ids;
            best = larger(score, best);
        }
        int64_t found = best_of((const float*)&best, LANES);
        float highest = best[found];
        token = ids[found];
        best[found] = second[found];
        return highest - std::max(largest(best), largest(second)) >= CLOSE * (1.0 + std::fabs(highest));
    }

    Edge edge(const Sampling& all, int64_t row) {
        int64_t top_k = all.top_ks[row];
        double top_p = all.top_ps[row], min_p = all.min_ps[row];
        Edge found;
        if (top_k > 0 && top_k < all.vocab) found.score = score_of_rank(top_k);
        if (top_p < 1) found = nucleus(top_p, found);
        float below = min_p > 0 ? top + (float)std::log(min_p) : NONE;
        return below > found.score ? Edge{below} : found;
    }

    float score_of_rank(int64_t rank) {
        if (rank > FEW) {
            ranked = scaled;
            std::nth_element(ranked.begin(), ranked.begin() + rank - 1, ranked.end(), std::greater<float>());
            return ranked[rank - 1];
        }
        listed.resize(rank);
        Best best{listed.data(), rank, 0};
        best.offer(scaled.data(), scaled.size());
        return listed[rank - 1].score;
    }

    // Top-p among the tokens that top-k kept: a token is removed if its mass and that of all less likely tokens is at
    // most 1 - p. Among equal scores the lowest ids count as less likely.
    Edge nucleus(double top_p, const Edge& kept) {
        double total = weigh(kept.score), above = 0.0, most_left = 1.0 - top_p;
        // all tokens below `cut` together have at most half of the mass that is removed
        float cut = top + (float)std::log(most_left / (2.0 * scaled.size())), per_unit = BINS / (top - cut);
        float lowest = std::max(kept.score, cut);
        // Calls `visit` with each register's first id and its tokens' bins, except where all tokens are below `lowest`.
        auto each = [&](auto&& visit) {
            for (size_t i = 0; i < scaled.size(); i += LANES) {
                vec scores = load(&scaled[i]), bins = (top - scores) * per_unit;
                if (!any(scores >= lowest)) continue;
                bins = scores >= lowest && bins < BINS - 1.0f ? bins : all(BINS - 1.0f);
                visit(i, __builtin_convertvector(bins, ints));
            }
        };
        masses.assign(BINS, 0.0);
        each([&](size_t first, ints bins) {
            for (int64_t lane = 0; lane < LANES; lane++) masses[bins[lane]] += weights[first + lane];
        });
        int64_t last = 0;
        while (last < BINS - 1 && 1.0 - (above + masses[last]) / total > most_left) above += masses[last++];
        listed.clear();
        each([&](size_t first, ints bins) {
            if (!any(bins == (int32_t)last)) return;
            for (int64_t i = first; i < (int64_t)first + LANES; i++)
                if (bins[i - first] == last && scaled[i] >= lowest) listed.push_back({scaled[i], i});
        });
        std::sort(listed.begin(), listed.end(), [](const Scored& a, const Scored& b) {
            return a.score > b.score || (a.score == b.score && a.index > b.index);
        });
        Edge end = kept;
        for (const Scored& token : listed) {
            if (above > 0.0 && 1.0 - above / total <= most_left) return {token.score, token.index};
            above += weights[token.index];
            end = {token.score, -1};
        }
        return end;
    }

    // Computes e^(score - top) of all tokens from `least` on, and returns the sum.
    double weigh(float least) {
        weights.resize(scaled.size());
        double total = 0.0;
        vec part = {};
        for (size_t i = 0; i < scaled.size(); i += LANES) {
            vec score = load(&scaled[i]);
            vec weight = score >= least && score != NONE ? exponential(score - top) : vec{};
            store(&weights[i], weight);
            part += weight;
            // few numbers are added in float32, whose rounding would add up
            if (i / LANES % 16 == 15) total += sum(part), part = vec{};
        }
        return total + sum(part);
    }
};

static void choose_tokens(const Sampling& all) {
    static thread_local RowChoice rows;
    for (int64_t row = 0; row < all.num_rows; row++) {
        all.tokens[row] = 0;
        all.sure[row] = rows.choose(all, row, all.tokens[row]);
    }
}
