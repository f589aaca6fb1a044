"""Tensors that cross a boundary: between engine and model, and between verifier and drafter.

Dimensions: num_slots is the number of rows of persistent state; num_nodes is the number of tree nodes per sequence,
including the root; max_path is the maximum number of tokens that a round can emit; taps_size is the number of tapped
elements per token.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wingbeat.runtime.config import NUM_BINS, EngineConfig
from wingbeat.runtime.protocol.chunk_inputs import ChunkInputs
from wingbeat.runtime.protocol.sampling_rules import MOST_BIASED, NUM_RULES, SamplingRules


@dataclass(frozen=True)
class ChannelSpec:
    """Shapes of all buffers between a verifier and its drafter, which are constant while the channel exists."""

    num_slots: int
    num_nodes: int
    max_path: int
    max_prefill_tokens: int
    taps_size: int
    """Number of tapped elements per token; 0 if the drafter needs no hidden states."""
    max_model_len: int
    max_blocks_per_seq: int
    block_size: int
    num_blocks: int
    """Number of blocks of the verifier's KV pool; the drafter stores its KV under the same block ids."""
    taps_dtype: torch.dtype = torch.float32
    keeps_context: bool = True
    """Whether the drafter keeps state for each committed position and must therefore receive every position; see
    `DrafterNeeds`."""
    vocab_size: int = 0
    """Vocabulary size of the verifier; the width of the masks of allowed tokens depends on this size. 0 if such masks
    are never sent.
    """
    embedding_width: int = 0
    """Width of the embeddings of prompt spans; 0 if embeddings are not sent."""
    num_axes: int = 0
    """Number of rotary positions sent per token: 3 (time, row and column) if prompts may have spans with such
    positions; else 0.
    """

    @classmethod
    def of(cls, config: EngineConfig, **others: Any) -> "ChannelSpec":
        """Returns a spec from an engine's settings, and from the fields that do not follow from the settings."""
        return cls(
            num_slots=config.max_num_seqs,
            num_nodes=config.speculation.num_nodes,
            max_path=config.speculation.max_path,
            max_prefill_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            max_blocks_per_seq=config.max_blocks_per_seq,
            block_size=config.block_size,
            **others,
        )


class TokenTree(NamedTuple):
    """Draft trees of several sequences; chains are trees too. Node 0 is the root, the last committed token."""

    token_ids: Tensor
    """int64 [num_reqs, num_nodes]"""
    parents: Tensor
    """int64 [num_reqs, num_nodes]: smaller than the node's own index; -1 for the root."""
    depths: Tensor
    """int64 [num_reqs, num_nodes]; 0 for the root."""
    scores: Tensor
    """float32 [num_reqs, num_nodes]: cumulative log-probability of the path."""
    num_valid: Tensor
    """int64 [num_reqs]: number of valid nodes, including the root; 1 means that the tree is a bare root."""


class AcceptedPaths(NamedTuple):
    """Result of a round for its decodes, on the device; rows are in the order of `SchedulerOutput.decodes`."""

    slots: Tensor
    """int64 [num_decodes]"""
    positions: Tensor
    """int64 [num_decodes]: position of each root."""
    token_ids: Tensor
    """int64 [num_decodes, max_path]: accepted tokens, then the bonus token, then zeros."""
    num_tokens: Tensor
    """int64 [num_decodes]: number of tokens emitted, 1..max_path."""
    num_valid: Tensor
    """int64 [num_decodes]: number of nodes that were verified, including the root."""
    nodes: Tensor
    """int64 [num_decodes, 1..max_path]: indices of the root and the accepted nodes, padded with the last accepted node.
    """
    taps: Tensor | None
    """[num_decodes, 1..max_path, taps_size]: taps along the path, with as many columns as `nodes`."""
    evidence: Tensor | None = None
    """int64 [num_decodes, num_nodes]: see `runtime.adaptive.acceptance`; None if the device did not prune trees."""
    logprobs: Tensor | None = None
    """int64 [num_asking, 1..max_path, n]: log-probabilities as packed by `runtime.round.choice`; None if no request
    wants log-probabilities. Captured rounds have a row for every decode; other rounds have a row only for decodes whose
    requests want log-probabilities.
    """
    tree_token_ids: Tensor | None = None
    """int64 [num_decodes, num_nodes]: token ids of the walked trees; None if all were bare roots."""
    tree_parents: Tensor | None = None
    columns: Tensor | None = None
    """int64 [num_decodes, max_path]: columns of the token history into which the emitted tokens are written; None if
    the device did not compute them."""
    packed: Tensor | None = None
    """int64 [num_decodes, n]: the tensors of `downloads` side by side; None if the device did not pack them."""

    def downloads(self) -> dict[str, Tensor]:
        """Returns the tensors that are downloaded to the host, by name."""
        names = ("num_tokens", "num_valid", "token_ids", "nodes", "evidence", "logprobs")
        return {name: part for name in names if (part := getattr(self, name)) is not None}


class RoundHeader(NamedTuple):
    """Data of a round that the drafter's host needs: the fields of `Outcome.header`."""

    round_number: int = 0
    """Number of the round; the channel sets it when the round is published."""
    num_decodes: int = 0
    num_chunks: int = 0
    num_proposals: int = 0
    max_levels: int = 0
    """Maximum number of levels to grow."""
    max_len: int = 0
    """Upper bound of the length of the longest sequence; 0 if the verifier's host does not have such a bound."""
    has_rule: int = 0
    """1 if the outcome holds a rule by which growth stops."""
    has_masks: int = 0
    """1 if the outcome holds masks of the tokens allowed after the roots."""
    sampling_rules: int = 0
    """`RuleKinds` of the sequences for which trees are requested; 0 if no such sequence has sampling rules."""
    has_inputs: int = 0
    """1 if a chunk has tokens of spans, or if a token of a span follows a chunk; `Outcome.inputs` then holds inputs of
    all chunks."""

    @classmethod
    def read(cls, header: Tensor) -> "RoundHeader":
        """Reads the header from a tensor int64 [16] on the host."""
        return cls(*header.tolist()[: len(cls._fields)])

    def write(self, header: Tensor) -> None:
        """Writes the header into a tensor int64 [16] on the host; elements after the fields stay zero."""
        header.numpy()[: len(self)] = self

    @staticmethod
    def stamp(header: np.ndarray, round_number: int) -> None:
        """Writes the round's number into a header whose other fields are already written."""
        header[0] = round_number


class ReplyHeader(NamedTuple):
    """Round number and drafter incarnation of an answer: the first fields of `TreeReply.header`."""

    round_number: int = 0
    incarnation: int = 0
    """Incarnation of the drafter."""

    @classmethod
    def read(cls, header: np.ndarray | Tensor) -> "ReplyHeader":
        """Reads the header from int64 [16] on the host."""
        return cls(*header.tolist()[: len(cls._fields)])

    def write(self, header: np.ndarray | Tensor) -> None:
        """Writes the header into int64 [16] on the host; the other elements hold `DrafterFigures`."""
        header[0], header[1] = self


DRAFT_PARTS = (*(f"draft_level_{number}" for number in range(1, 8)), "draft_trees")
"""Names of the parts of a pass that grows trees: its levels, the last of which stands for all deeper ones, and the
selection of the trees' nodes."""


REPLY_WORDS = 16
"""Number of words of `TreeReply.header`."""


class DrafterFigures(NamedTuple):
    """Timings and counters that a drafter sends with every answer, in `TreeReply.header` after `ReplyHeader`.

    Names that end in `_us` are in microseconds.
    """

    started_ns: int = 0
    """Time at which the drafter began the round, in nanoseconds since 1970."""
    commit_us: int = 0
    """Host time of committing decided tokens."""
    levels_us: int = 0
    """Host time of growing trees; includes the time of committing if a single call or graph commits and grows."""
    reply_us: int = 0
    """Host time of writing the answer."""
    device_commit_us: int = 0
    """Device time of committing decided tokens, summed over all rounds so far; `device_levels_us` is the device time of
    growing trees."""
    device_levels_us: int = 0
    captured: int = 0
    """Number of captured stages, as counted by `GraphStats.counts`; the next two fields count failed and untried
    stages."""
    failed: int = 0
    eager: int = 0
    head_version: int = 0
    """Version of the head that drafted; 0 is the head named in the settings."""
    device_parts_us: tuple[int, ...] = (0,) * len(DRAFT_PARTS)
    """`device_levels_us` by DRAFT_PARTS, as far as passes are captured and their graphs were timed."""

    @classmethod
    def read(cls, header: np.ndarray | Tensor) -> "DrafterFigures":
        """Reads the figures from a reply's header and clamps them to valid ranges, because a drafter is not trusted."""
        started_ns, host, reply, commit, levels, stages, *parts = header.tolist()[2:]
        spans, version = (host >> 32 & _WORD, host & _WORD, reply & _WORD), reply >> 32 & _WORD >> 1
        counts = (stages & _COUNT, stages >> 20 & _COUNT, stages >> 40 & _COUNT)
        times = (max(commit, 0), max(levels, 0))
        return cls(max(started_ns, 0), *spans, *times, *counts, version, tuple(max(part, 0) for part in parts))

    def write(self, header: np.ndarray) -> None:
        """Writes the figures into a reply's header, clamped to the widths of their fields."""
        stages = min(self.captured, _COUNT) | min(self.failed, _COUNT) << 20 | min(self.eager, _COUNT) << 40
        host = min(self.commit_us, _WORD >> 1) << 32 | min(self.levels_us, _WORD)
        reply = min(self.head_version, _WORD >> 1) << 32 | min(self.reply_us, _WORD)
        header[2:8] = self.started_ns, host, reply, self.device_commit_us, self.device_levels_us, stages
        header[8:] = self.device_parts_us


_WORD, _COUNT = (1 << 32) - 1, (1 << 20) - 1


class Outcome(NamedTuple):
    """Message from verifier to drafter, once per round: decided tokens, and the hidden states to draft from.

    Decode row r is a running sequence whose root and accepted path were computed in this round. Chunk c is a piece of a
    prompt, or a piece of context that is replayed because the drafter lacks it. EAGLE heads read pairs (taps at
    position i, token i + 1).
    """

    header: Tensor
    """int64 [16]: `RoundHeader`."""
    decode_slots: Tensor
    """int64 [num_slots]: slot of each decode. The first num_decodes rows are valid, as in all decode_ fields."""
    decode_positions: Tensor
    """int64 [num_slots]: position of each row's root, which is the first computed position."""
    decode_num_tokens: Tensor
    """int64 [num_slots]: number of tokens emitted, 1..max_path, which equals the number of positions computed."""
    decode_token_ids: Tensor
    """int64 [num_slots, max_path]: emitted tokens; token [r, j] follows position decode_positions[r] + j."""
    decode_taps: Tensor
    """[num_slots, max_path, taps_size]: taps; row [r, j] is at position decode_positions[r] + j."""
    chunk_slots: Tensor
    """int64 [num_slots]: slot of each chunk. The first num_chunks rows are valid, as in chunk_positions and chunk_lens.
    """
    chunk_positions: Tensor
    """int64 [num_slots]: first position of the chunk."""
    chunk_lens: Tensor
    """int64 [num_slots]: number of tokens of each chunk; chunks are concatenated in `chunk_next_token_ids` and
    `chunk_taps`."""
    chunk_next_token_ids: Tensor
    """int64 [max_prefill_tokens]: the token after each position of the chunks."""
    chunk_taps: Tensor
    """[max_prefill_tokens, taps_size]"""
    proposal_slots: Tensor
    """int64 [num_slots]: slots for which a tree is requested. The first num_proposals rows are valid."""
    epochs: Tensor
    """int64 [num_slots] by slot: incremented whenever a slot gets another sequence or loses its state."""
    committed_lens: Tensor
    """int64 [num_slots] by slot: number of decided tokens; the last decided token is the next root and is not computed
    yet."""
    block_tables: Tensor
    """int64 [num_slots, max_blocks_per_seq] by slot; only rows of decodes, chunks and proposals are up to date."""
    temperatures: Tensor
    """float32 [num_slots] by slot; 0 is greedy."""
    seeds: Tensor
    """int64 [num_slots] by slot: seed of the sampling noise, for drafters that rank candidates with the target's noise.
    """
    last_token_ids: Tensor
    """int64 [num_slots] by slot: last decided token, the root of the next tree."""
    position_deltas: Tensor
    """int64 [num_slots] by slot: offset added to the rotary positions of text after a prompt's spans."""
    chunk_axes: Tensor
    """int64 [max_prefill_tokens, num_axes]: see `ChunkInputs`. This field and the next two are valid if
    `RoundHeader.has_inputs` is 1."""
    chunk_shown: Tensor
    """int64 [max_prefill_tokens]"""
    chunk_embeddings: Tensor
    """[max_prefill_tokens, embedding_width]"""
    growth_limits: Tensor
    """float32 [2]: `adaptive.policy.GrowthLimits`. This field and `acceptance_table` are valid if
    `RoundHeader.has_rule` is 1."""
    acceptance_table: Tensor
    """float32 [2, NUM_BINS]: rows of `adaptive.acceptance.Acceptance.table` for the drafter's trees: for greedy,
    then for sampled requests."""
    allowed_tokens: Tensor
    """int32 [num_slots, ceil(vocab_size / 32)], valid if `RoundHeader.has_masks` is 1. Each proposal has a row, in
    which bit b of word w is set if token 32 * w + b is allowed after the root."""
    sampling_rules: Tensor
    """float32 [num_slots, NUM_RULES] by slot: `sampling_rules.RuleColumns`. This field and the next two are valid if
    `RoundHeader.sampling_rules` is not 0."""
    biased_token_ids: Tensor
    """int64 [num_slots, MOST_BIASED] by slot: see `sampling_rules.SamplingRules`."""
    biases: Tensor
    """float32 [num_slots, MOST_BIASED] by slot."""

    @property
    def rules(self) -> SamplingRules:
        """Returns the sampling rules of all slots."""
        return SamplingRules(self.sampling_rules, self.biased_token_ids, self.biases)

    def inputs(self, num_tokens: int) -> ChunkInputs:
        """Returns the drafter inputs of the chunks, which have `num_tokens` tokens in total."""
        return ChunkInputs(*(part[:num_tokens] for part in (self.chunk_axes, self.chunk_shown, self.chunk_embeddings)))


class TreeReply(NamedTuple):
    """Message from drafter to verifier, once per round: a token tree for each proposal, in the row of its slot."""

    header: Tensor
    """int64 [16]: `ReplyHeader`, then `DrafterFigures`."""
    epochs: Tensor
    """int64 [num_slots]: epoch for which each tree was grown."""
    committed_lens: Tensor
    """int64 [num_slots]: committed length from which each tree was grown; the verifier drops a tree whose length or
    epoch differs from the sequence's."""
    token_ids: Tensor
    """int64 [num_slots, num_nodes]; node 0 is the root, the last committed token."""
    parents: Tensor
    """int64 [num_slots, num_nodes]: smaller than the node's own index; -1 for the root."""
    depths: Tensor
    """int64 [num_slots, num_nodes]; 0 for the root."""
    scores: Tensor
    """float32 [num_slots, num_nodes]: cumulative log-probability of the path."""
    num_valid: Tensor
    """int64 [num_slots]: number of valid nodes, including the root; 1 means that the tree is a bare root."""


def outcome_layout(spec: ChannelSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns the shape and dtype of each `Outcome` field, in field order."""
    slots, long = (spec.num_slots,), torch.int64
    return {
        "header": ((16,), long),
        "decode_slots": (slots, long),
        "decode_positions": (slots, long),
        "decode_num_tokens": (slots, long),
        "decode_token_ids": ((spec.num_slots, spec.max_path), long),
        "decode_taps": ((spec.num_slots, spec.max_path, spec.taps_size), spec.taps_dtype),
        "chunk_slots": (slots, long),
        "chunk_positions": (slots, long),
        "chunk_lens": (slots, long),
        "chunk_next_token_ids": ((spec.max_prefill_tokens,), long),
        "chunk_taps": ((spec.max_prefill_tokens, spec.taps_size), spec.taps_dtype),
        "proposal_slots": (slots, long),
        "epochs": (slots, long),
        "committed_lens": (slots, long),
        "block_tables": ((spec.num_slots, spec.max_blocks_per_seq), long),
        "temperatures": (slots, torch.float32),
        "seeds": (slots, long),
        "last_token_ids": (slots, long),
        "position_deltas": (slots, long),
        "chunk_axes": ((spec.max_prefill_tokens, spec.num_axes), long),
        "chunk_shown": ((spec.max_prefill_tokens if spec.embedding_width else 0,), long),
        "chunk_embeddings": ((spec.max_prefill_tokens, spec.embedding_width), spec.taps_dtype),
        "growth_limits": ((2,), torch.float32),
        "acceptance_table": ((2, NUM_BINS), torch.float32),
        "allowed_tokens": ((spec.num_slots, -(-spec.vocab_size // 32)), torch.int32),
        "sampling_rules": ((spec.num_slots, NUM_RULES), torch.float32),
        "biased_token_ids": ((spec.num_slots, MOST_BIASED), long),
        "biases": ((spec.num_slots, MOST_BIASED), torch.float32),
    }


def reply_layout(spec: ChannelSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns the shape and dtype of each `TreeReply` field, in field order."""
    slots, nodes, long = (spec.num_slots,), (spec.num_slots, spec.num_nodes), torch.int64
    return {
        "header": ((REPLY_WORDS,), long),
        "epochs": (slots, long),
        "committed_lens": (slots, long),
        "token_ids": (nodes, long),
        "parents": (nodes, long),
        "depths": (nodes, long),
        "scores": (nodes, torch.float32),
        "num_valid": (slots, long),
    }
