"""Tensors that cross a boundary: between engine and model, and between verifier and drafter.

Dimension words: num_slots rows of persistent state, num_nodes tree nodes per sequence (root included), max_path
tokens one round can emit, taps_size = taps x verifier hidden size.
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
    """Shapes of every buffer between a verifier and its drafter; fixed for the channel's life."""

    num_slots: int
    num_nodes: int
    max_path: int
    max_prefill_tokens: int
    taps_size: int
    """0 where the drafter needs no hidden states."""
    max_model_len: int
    max_blocks_per_seq: int
    block_size: int
    num_blocks: int
    """Of the verifier's KV pool: the drafter's KV lives under the same block ids."""
    taps_dtype: torch.dtype = torch.float32
    keeps_context: bool = True
    """Whether the drafter keeps state per committed position, so that it is told of every one; see `DrafterNeeds`."""
    vocab_size: int = 0
    """Of the verifier; 0 where the drafter is never told which tokens are allowed: with rounds in flight the host knows
    the roots too late."""
    embedding_width: int = 0
    """Width of the embeddings of prompts' spans; 0 where the drafter is never shown them."""
    num_axes: int = 0
    """Axes of positions in prompts: 3 where spans are rotated by row and column, and the drafter is told so."""

    @classmethod
    def of(cls, config: EngineConfig, **others: Any) -> "ChannelSpec":
        """What an engine's settings say of it, and the fields that they do not."""
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
    """Draft trees of several sequences; a chain is a tree. Node 0 is the root, the last committed token."""

    token_ids: Tensor
    """int64 [num_reqs, num_nodes]"""
    parents: Tensor
    """int64 [num_reqs, num_nodes]: smaller than the node's own index; -1 for the root."""
    depths: Tensor
    """int64 [num_reqs, num_nodes]; 0 for the root."""
    scores: Tensor
    """float32 [num_reqs, num_nodes]: cumulative log-probability of the path."""
    num_valid: Tensor
    """int64 [num_reqs]: nodes that count, root included; 1 is a bare root."""


class AcceptedPaths(NamedTuple):
    """What a round decided for its decodes, on the device; rows are in the order of `SchedulerOutput.decodes`."""

    slots: Tensor
    """int64 [num_decodes]"""
    positions: Tensor
    """int64 [num_decodes]: position of each root."""
    token_ids: Tensor
    """int64 [num_decodes, max_path]: accepted tokens, then the bonus token; the rest is zero."""
    num_tokens: Tensor
    """int64 [num_decodes]: tokens emitted, 1..max_path."""
    num_valid: Tensor
    """int64 [num_decodes]: nodes that were verified, root included."""
    nodes: Tensor
    """int64 [num_decodes, 1..max_path]: root and accepted nodes, the last one repeated."""
    taps: Tensor | None
    """[num_decodes, 1..max_path, taps_size] along the path, as many columns as `nodes` has."""
    evidence: Tensor | None = None
    """int64 [num_decodes, num_nodes]: see `runtime.speculation.acceptance`; None where trees were not pruned there."""
    logprobs: Tensor | None = None
    """int64 [num_asking, 1..max_path, n]: see `runtime.round.choice`; None where nobody asks. Where the
    round is captured every decode has a row, and else those that ask."""
    tree_token_ids: Tensor | None = None
    """int64 [num_decodes, num_nodes]: the trees that were walked, as the next one; None where all were bare roots."""
    tree_parents: Tensor | None = None
    columns: Tensor | None = None
    """int64 [num_decodes, max_path]: where in the history the tokens belong, where the device has worked it out."""
    packed: Tensor | None = None
    """int64 [num_decodes, n]: `told` side by side, where the device has put it so."""

    def told(self) -> dict[str, Tensor]:
        """What of this the host is told, by name."""
        names = ("num_tokens", "num_valid", "token_ids", "nodes", "evidence", "logprobs")
        return {name: part for name in names if (part := getattr(self, name)) is not None}


class RoundHeader(NamedTuple):
    """What the drafter's host must know of a round: `Outcome.header` by name."""

    round_number: int = 0
    """Stamped by the channel when the round is published."""
    num_decodes: int = 0
    num_chunks: int = 0
    num_proposals: int = 0
    max_levels: int = 0
    """Most levels to grow."""
    max_len: int = 0
    """A bound of the longest sequence; 0 where the verifier's host cannot tell."""
    has_rule: int = 0
    """1 where growth stops by a rule, which the outcome holds."""
    has_masks: int = 0
    """1 where not every token may follow the roots, and the outcome says which ones may."""
    sampling_rules: int = 0
    """`RuleKinds` of the sequences that trees are asked for, whose rules of sampling the outcome holds; 0 where none of
    them has any."""
    has_inputs: int = 0
    """1 where a chunk has tokens of spans, or stands before some: `Outcome.inputs` has those of all chunks."""

    @classmethod
    def read(cls, header: Tensor) -> "RoundHeader":
        """Of a tensor int64 [16] on the host."""
        return cls(*header.tolist()[: len(cls._fields)])

    def write(self, header: Tensor) -> None:
        """Into a tensor int64 [16] on the host; the rest of it stays zero."""
        header.numpy()[: len(self)] = self

    @staticmethod
    def stamp(header: np.ndarray, round_number: int) -> None:
        """Number a header that is filled in otherwise."""
        header[0] = round_number


class ReplyHeader(NamedTuple):
    """Which round is answered, and by whom: `TreeReply.header` by name."""

    round_number: int = 0
    incarnation: int = 0
    """Of the drafter."""

    @classmethod
    def read(cls, header: np.ndarray | Tensor) -> "ReplyHeader":
        """Of int64 [8] on the host."""
        return cls(*header.tolist()[: len(cls._fields)])

    def write(self, header: np.ndarray | Tensor) -> None:
        """Into int64 [8] on the host; the rest is `DrafterFigures`."""
        header[0], header[1] = self


class DrafterFigures(NamedTuple):
    """What a drafter says of itself with every answer: `TreeReply.header` behind `ReplyHeader`; `_us`: microseconds."""

    started_ns: int = 0
    """When it began with the round, nanoseconds since 1970."""
    commit_us: int = 0
    """What its host then took to take in decided tokens."""
    levels_us: int = 0
    """And to grow trees: both together where one call or one graph does both."""
    reply_us: int = 0
    """And to write the answer."""
    device_commit_us: int = 0
    """Of its device, over all rounds so far, as the next."""
    device_levels_us: int = 0
    captured: int = 0
    """Stages at one shape, as `GraphStats.counts`, as the next two."""
    failed: int = 0
    eager: int = 0
    head_version: int = 0
    """Of the head that drafted: 0 is the one that the settings name."""

    @classmethod
    def read(cls, header: np.ndarray | Tensor) -> "DrafterFigures":
        """Of a reply's header. Whatever it holds, the figures are in range: a drafter may be on another node."""
        started_ns, host, reply, commit, levels, stages = header.tolist()[2:8]
        spans, version = (host >> 32 & _WORD, host & _WORD, reply & _WORD), reply >> 32 & _WORD >> 1
        counts = (stages & _COUNT, stages >> 20 & _COUNT, stages >> 40 & _COUNT)
        return cls(max(started_ns, 0), *spans, max(commit, 0), max(levels, 0), *counts, version)

    def write(self, header: np.ndarray) -> None:
        """Into a reply's header."""
        stages = min(self.captured, _COUNT) | min(self.failed, _COUNT) << 20 | min(self.eager, _COUNT) << 40
        host = min(self.commit_us, _WORD >> 1) << 32 | min(self.levels_us, _WORD)
        reply = min(self.head_version, _WORD >> 1) << 32 | min(self.reply_us, _WORD)
        header[2:8] = self.started_ns, host, reply, self.device_commit_us, self.device_levels_us, stages


_WORD, _COUNT = (1 << 32) - 1, (1 << 20) - 1


class Outcome(NamedTuple):
    """Verifier -> drafter, once per round: what was decided, and the hidden states to draft from.

    Decode row r is a running sequence whose root and accepted path were computed this round; chunk c is a piece of
    prompt (or of context replayed for a drafter that lacks it). A pair (taps at position i, token i + 1) feeds EAGLE.
    """

    header: Tensor
    """int64 [16]: `RoundHeader`."""
    decode_slots: Tensor
    """int64 [num_slots], the first num_decodes rows count."""
    decode_positions: Tensor
    """int64 [num_slots]: position of row r's root, the first one computed."""
    decode_num_tokens: Tensor
    """int64 [num_slots]: tokens emitted = positions computed, 1..max_path."""
    decode_token_ids: Tensor
    """int64 [num_slots, max_path]: emitted tokens; [r, j] follows position decode_positions[r] + j."""
    decode_taps: Tensor
    """[num_slots, max_path, taps_size] at those positions."""
    chunk_slots: Tensor
    """int64 [num_slots], the first num_chunks rows count."""
    chunk_positions: Tensor
    """int64 [num_slots]: first position of the chunk."""
    chunk_lens: Tensor
    """int64 [num_slots]; chunks lie back to back in the two tensors below."""
    chunk_next_token_ids: Tensor
    """int64 [max_prefill_tokens]: the token after each position."""
    chunk_taps: Tensor
    """[max_prefill_tokens, taps_size]"""
    proposal_slots: Tensor
    """int64 [num_slots], the first num_proposals want a tree next."""
    epochs: Tensor
    """int64 [num_slots] by slot: bumped whenever a slot gets another sequence or loses its state."""
    committed_lens: Tensor
    """int64 [num_slots] by slot: tokens decided; the last one is the next root and is not computed yet."""
    block_tables: Tensor
    """int64 [num_slots, max_blocks_per_seq] by slot; only rows of decodes, chunks and proposals are fresh."""
    temperatures: Tensor
    """float32 [num_slots] by slot; 0 is greedy."""
    seeds: Tensor
    """int64 [num_slots] by slot: noise seed, for drafters that rank candidates with the target's own noise."""
    last_token_ids: Tensor
    """int64 [num_slots] by slot: the last decided token, which is the root of the next tree."""
    position_deltas: Tensor
    """int64 [num_slots] by slot: by how much the text behind a prompt's spans is rotated as if it stood elsewhere."""
    chunk_axes: Tensor
    """int64 [max_prefill_tokens, num_axes], with the next two: see `ChunkInputs`; read where the header says so."""
    chunk_shown: Tensor
    """int64 [max_prefill_tokens]"""
    chunk_embeddings: Tensor
    """[max_prefill_tokens, embedding_width]"""
    growth_limits: Tensor
    """float32 [2]: `speculation.policy.GrowthLimits`; read where the header says so, as the next one."""
    acceptance_table: Tensor
    """float32 [2, NUM_BINS]: `speculation.acceptance.Acceptance.table`."""
    allowed_tokens: Tensor
    """int32 [num_slots, ceil(vocab_size / 32)], a row per proposal, read where the header says so: bit b of word w
    allows token 32 * w + b behind the root."""
    sampling_rules: Tensor
    """float32 [num_slots, NUM_RULES] by slot: `sampling_rules.RuleColumns`; read where the header says so, as the next
    two."""
    biased_token_ids: Tensor
    """int64 [num_slots, MOST_BIASED] by slot: see `sampling_rules.SamplingRules`."""
    biases: Tensor
    """float32 [num_slots, MOST_BIASED] by slot."""

    @property
    def rules(self) -> SamplingRules:
        """Of every slot."""
        return SamplingRules(self.sampling_rules, self.biased_token_ids, self.biases)

    def inputs(self, num_tokens: int) -> ChunkInputs:
        """Of the chunks, which have so many tokens together."""
        return ChunkInputs(*(part[:num_tokens] for part in (self.chunk_axes, self.chunk_shown, self.chunk_embeddings)))


class TreeReply(NamedTuple):
    """Drafter -> verifier, once per round: one token tree per proposal, in the sequence's slot row."""

    header: Tensor
    """int64 [8]: `ReplyHeader`, then `DrafterFigures`."""
    epochs: Tensor
    """int64 [num_slots]: the epoch each tree was grown for."""
    committed_lens: Tensor
    """int64 [num_slots]: the committed length each tree was grown from; a tree that does not match is dropped."""
    token_ids: Tensor
    """int64 [num_slots, num_nodes]; node 0 is the root, the last committed token."""
    parents: Tensor
    """int64 [num_slots, num_nodes]: smaller than the node's own index; -1 for the root."""
    depths: Tensor
    """int64 [num_slots, num_nodes]; 0 for the root."""
    scores: Tensor
    """float32 [num_slots, num_nodes]: cumulative log-probability of the path."""
    num_valid: Tensor
    """int64 [num_slots]: nodes that count, root included; 1 is a bare root."""


def outcome_layout(spec: ChannelSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each `Outcome` field, in field order."""
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
    """Shape and dtype of each `TreeReply` field, in field order."""
    slots, nodes, long = (spec.num_slots,), (spec.num_slots, spec.num_nodes), torch.int64
    return {
        "header": ((8,), long),
        "epochs": (slots, long),
        "committed_lens": (slots, long),
        "token_ids": (nodes, long),
        "parents": (nodes, long),
        "depths": (nodes, long),
        "scores": (nodes, torch.float32),
        "num_valid": (slots, long),
    }
