// Answers a round of a verifier's channel, from the outcome to the reply: a head's `take_in` and `grow`, without Python
// in between.
#pragma once

#include "growth.h"

// Outcome buffers of one parity; names are those of `runtime.protocol.messages`.
struct Outcome {
    const int64_t* header;
    const int64_t *decode_slots, *decode_positions, *decode_num_tokens, *decode_token_ids;
    const float* decode_taps;
    const int64_t *chunk_slots, *chunk_positions, *chunk_lens, *chunk_next_token_ids;
    const float* chunk_taps;
    const int64_t *proposal_slots, *epochs, *committed_lens, *block_tables;
    const float* temperatures;
    const int64_t *seeds, *position_deltas;
    const float *growth_limits, *acceptance_table;
    const int32_t* allowed_tokens;
    SamplingRules rules;
};

struct Reply {
    int64_t *epochs, *committed_lens;
    Trees trees;
};

struct Channel {
    Outcome outcome;
    Reply reply;
    const int64_t* token_ids;  // [num_slots, history_width]
    int64_t num_slots, max_path, taps_size, max_blocks, history_width, allowed_words;
    int64_t top_k, least_levels, max_levels;
    const double* bin_edges;
    int64_t num_bins, max_chunk_tokens;
};

// Fields of `runtime.protocol.messages.RoundHeader`, in order.
enum HeaderField { ROUND, NUM_DECODES, NUM_CHUNKS, NUM_PROPOSALS, MAX_LEVELS, MAX_LEN, HAS_RULE, HAS_MASKS, HAS_SAMPLING_RULES };

static bool all_within(const int64_t* numbers, int64_t count, int64_t end) {
    return std::all_of(numbers, numbers + count, [&](int64_t number) { return 0 <= number && number < end; });
}

// True if every count, slot and block is within the channel's limits. The outcome is written by another process, and
// addresses are computed from these numbers. Positions and tokens are clamped where they are used.
static bool fits(const Sequences& all, const Channel& channel) {
    const Outcome& outcome = channel.outcome;
    const int64_t *header = outcome.header, slots = channel.num_slots;
    int64_t num_decodes = header[NUM_DECODES], num_chunks = header[NUM_CHUNKS], num_proposals = header[NUM_PROPOSALS];
    for (int64_t count : {num_decodes, num_chunks, num_proposals})
        if (count < 0 || count > slots) return false;
    int64_t left = channel.max_chunk_tokens;
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        int64_t length = outcome.chunk_lens[chunk];
        if (length < 1 || length > left) return false;
        left -= length;
    }
    auto tables_fit = [&](const int64_t* of, int64_t count) {
        for (int64_t i = 0; i < count; i++)
            if (!all_within(outcome.block_tables + of[i] * channel.max_blocks, channel.max_blocks, all.first_private))
                return false;
        return true;
    };
    return all_within(outcome.decode_slots, num_decodes, slots) && all_within(outcome.chunk_slots, num_chunks, slots) &&
           all_within(outcome.proposal_slots, num_proposals, slots) &&
           all_within(outcome.decode_num_tokens, num_decodes, channel.max_path + 1) &&
           all_within(outcome.decode_positions, num_decodes, INT32_MAX) &&
           all_within(outcome.chunk_positions, num_chunks, INT32_MAX) &&
           tables_fit(outcome.decode_slots, num_decodes) && tables_fit(outcome.chunk_slots, num_chunks) &&
           tables_fit(outcome.proposal_slots, num_proposals);
}

// Answers a round. Returns false, having read and written nothing, if the outcome does not fit the channel.
template <class AnyHead>
static bool answer(const AnyHead& head, Sequences all, const Channel& channel, Room& at) {
    const Outcome& outcome = channel.outcome;
    const int64_t* header = outcome.header;
    if (!fits(all, channel)) return false;
    int64_t taps_size = channel.taps_size, begin = 0, num_proposals = header[NUM_PROPOSALS];
    all.block_tables = outcome.block_tables, all.deltas = outcome.position_deltas;
    all.table_stride = all.table_width = channel.max_blocks;
    for (int64_t chunk = 0; chunk < header[NUM_CHUNKS]; chunk++) {
        take_in(head, all, {1, outcome.chunk_slots + chunk, outcome.chunk_positions + chunk, outcome.chunk_lens + chunk,
                            outcome.chunk_next_token_ids + begin, outcome.chunk_taps + begin * taps_size, 0, 0}, at);
        begin += outcome.chunk_lens[chunk];
    }
    if (header[NUM_DECODES])
        take_in(head, all, {header[NUM_DECODES], outcome.decode_slots, outcome.decode_positions,
                            outcome.decode_num_tokens, outcome.decode_token_ids, outcome.decode_taps, channel.max_path,
                            channel.max_path * taps_size}, at);
    if (!num_proposals) return true;
    const Reply& reply = channel.reply;
    memcpy(reply.epochs, outcome.epochs, channel.num_slots * sizeof(int64_t));
    memcpy(reply.committed_lens, outcome.committed_lens, channel.num_slots * sizeof(int64_t));
    int64_t levels = header[MAX_LEVELS] ? header[MAX_LEVELS] : channel.max_levels;
    levels = std::clamp(levels, channel.least_levels, channel.max_levels);
    GrowthRule rule{0, num_proposals, 0.0, 0.0, outcome.acceptance_table, 1};
    if (header[HAS_RULE]) rule.min_reach = outcome.growth_limits[0], rule.price = outcome.growth_limits[1];
    Roots roots{num_proposals, outcome.proposal_slots, outcome.committed_lens, channel.token_ids, outcome.temperatures,
                outcome.seeds, channel.history_width, channel.history_width,
                header[HAS_MASKS] ? outcome.allowed_tokens : nullptr, channel.allowed_words, channel.top_k, levels,
                {&rule, header[HAS_RULE], channel.num_bins, channel.bin_edges}, reply.trees, 1,
                header[HAS_SAMPLING_RULES] ? outcome.rules : SamplingRules{}};
    grow(head, all, roots, at);
    return true;
}
