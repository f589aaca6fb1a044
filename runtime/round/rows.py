"""The rows of a forward pass: decodes, the flattened batch of these and of prompt chunks, and what features add.

Features add columns beside the rows, and a hand in the model while these are computed. Whoever builds and runs batches
knows none of them by name, and a feature that an engine has not costs nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from wingbeat.kernels.tree.reference import pack_mask
from wingbeat.runtime.protocol.messages import AcceptedPaths, TokenTree
from wingbeat.runtime.scheduling.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence


@dataclass
class Decodes:
    """Device inputs of a round's decodes: [num_reqs] or [num_reqs, num_nodes]."""

    slots: Tensor
    roots: Tensor
    token_ids: Tensor
    tree: TokenTree | None
    """None where all are bare roots."""
    positions: Tensor
    slot_mapping: Tensor
    tables: Tensor | None = field(default=None, kw_only=True)
    """int64 [num_reqs, max_blocks_per_seq], where they were gathered beside the rest."""

    def packed(self, padded: Tensor) -> Tensor:
        """[num_reqs, num_nodes, ...] as rows of the flattened batch."""
        return padded.flatten(0, 1)

    def padded(self, rows: Tensor) -> Tensor:
        """Rows of a batch that begins by these, [num_rows or more, n] -> [num_reqs, num_nodes, n]; any for padding."""
        shape = self.token_ids.shape
        return rows[: shape.numel()].unflatten(0, shape)

    def rows_of(self, nodes: Tensor) -> Tensor:
        """Row of the flattened batch of each node [num_reqs, n]."""
        return nodes + torch.arange(len(nodes), device=nodes.device)[:, None] * self.token_ids.shape[1]

    @property
    def num_rows(self) -> int:
        """Rows of the flattened batch."""
        return self.token_ids.numel()


ROWS_KEYWORD = "wingbeat_batch"
"""By which a model's layers are handed the batch."""
NO_COLUMNS: Mapping[type, Any] = {}


class Segment(NamedTuple):
    """Rows of the flattened batch that share a shape: all decodes and trees of a round, or one prompt chunk."""

    start: int
    """First row of the flattened batch."""
    num_reqs: int
    num_query: int
    """Rows of each request; the most of any where `row_starts` says how many each has."""
    block_tables: Tensor
    """int64 [num_reqs, num_table_blocks]"""
    num_context: Tensor
    """int64 [num_reqs], tokens before the first new row; row j is stored at num_context + j. Below 0 as for
    `tree_attention`."""
    positions: Tensor
    """int64 [num_reqs, num_new], logical positions of the new rows, of which the queries are the last."""
    mask_words: Tensor | None = None
    """int64 [num_reqs, num_query, ceil(num_new / 64)], as `kernels.tree.reference.pack_mask`; None is causal."""
    row_starts: Tensor | None = None
    """int64 [num_reqs + 1], rows of each request behind `start`, where they are not num_query; on the host alone."""

    @classmethod
    def of(
        cls, start: int, positions: Tensor, num_context: Tensor, visible: Tensor | None, block_tables: Tensor
    ) -> "Segment":
        """A segment whose rows see the context and, of the new rows, those that a mask shows.

        Args:
            positions: int64 [num_reqs, num_query], logical positions.
            visible: bool [num_reqs, num_query, num_query]; None is causal, with row j at position num_context + j.
        """
        # A single row sees the context and itself, which is what causal means.
        words = None if visible is None or positions.shape[1] == 1 else pack_mask(visible)
        return cls(start, *positions.shape, block_tables, num_context, positions, words)


class PackedSegments(Protocol):
    """Segments of a batch as a part's kernels read them."""

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float, /, **options: Any
    ) -> Tensor:
        """Attention of rows whose keys and values are stored; see `verifier.layers.attention.attend_segments`."""
        ...


class Rows(NamedTuple):
    """Rows of one forward pass, decodes and trees first, prompt chunks behind them; a model's layers get it as well."""

    token_ids: Tensor
    """int64 [1, num_tokens]"""
    positions: Tensor
    """int64 [1, num_tokens], logical (depth-based in trees), or [3, 1, num_tokens] where rows are rotated by three."""
    slot_mapping: Tensor
    """int64 [num_tokens]: where each row's KV goes."""
    segments: list[Segment]
    caches: list[tuple[Tensor, Tensor]]
    """(key_cache, value_cache) by layer."""
    logits_rows: Tensor | None = None
    """int64 [num_rows]: rows whose logits are needed; None needs all."""
    columns: Mapping[type, Any] = NO_COLUMNS
    """What features know of the rows, by kind."""
    around: tuple[Callable[[dict[str, Any]], AbstractContextManager], ...] = ()
    """Entered by features while a model runs, given its keyword arguments."""
    chunk_rows: Tensor | None = None
    """int64 [num_chunk_tokens]: rows of prompt chunks, behind the decodes'; None where there is no other."""
    captured: dict[int, Tensor] | None = None
    """By layer that is in it: filled with the rows' keys and values [num_tokens, heads * (key_dim + value_dim)]."""
    packed: PackedSegments | None = None
    """The segments as a part's kernels read them; None where `verifier.layers.attention` attends."""
    into: "ModelOutput | None" = None
    """Memory that a model may leave its output in."""


def joined(parts: list[Rows]) -> Rows:
    """Rows one behind the other, whose segments begin where they now are; what else there is is the first one's."""
    if len(parts) == 1:
        return parts[0]
    return parts[0]._replace(
        token_ids=torch.cat([part.token_ids for part in parts], dim=1),
        positions=torch.cat([part.positions for part in parts], dim=1),
        slot_mapping=torch.cat([part.slot_mapping for part in parts]),
        segments=[segment for part in parts for segment in part.segments],
    )


class ModelOutput(NamedTuple):
    """What a forward pass yields."""

    logits: Tensor
    """float [num_rows, vocab_size]"""
    taps: Tensor | None
    """[num_tokens, taps_size]: residual stream entering the tapped layers, low to high, then keys and values."""

    def split(self, num_rows: int) -> "tuple[ModelOutput, ModelOutput]":
        """Of the first rows, which all have logits, and of those behind them."""
        logits, taps = self
        before, behind = (None, None) if taps is None else (taps[:num_rows], taps[num_rows:])
        return ModelOutput(logits[:num_rows], before), ModelOutput(logits[num_rows:], behind)


Model = Callable[[Rows], ModelOutput]
"""Runs a batch: keys and values are written into its caches."""


class Placed:
    """Whose the rows of a batch are: the decodes', then those of prompt chunks.

    Args:
        plan: None at shapes that the arguments decide, in which nothing of the host's may be asked.
        decodes: None without any.
        chunk_slots: makes int64 [num_chunk_rows], the slots of the rows behind the decodes'; None without such.
        starts: by chunk of the plan: row of the batch of its first token.
        on_host: looking at a tensor is no wait.
    """

    def __init__(
        self,
        plan: SchedulerOutput | None,
        decodes: Decodes | None,
        chunk_slots: Callable[[], Tensor] | None,
        starts: list[int],
        on_host: bool,
    ) -> None:
        self.plan, self.decodes, self.starts, self.on_host = plan, decodes, starts, on_host
        self._chunk_slots = chunk_slots

    @cached_property
    def slots(self) -> Tensor:
        """int64 [num_rows]: of each row's sequence."""
        parts = []
        if self.decodes is not None:
            parts.append(self.decodes.packed(self.decodes.slots[:, None].expand_as(self.decodes.token_ids)))
        if self._chunk_slots is not None:
            parts.append(self._chunk_slots())
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Feature:
    """A feature of an engine; this one does nothing.

    A sequence is admitted, takes part in rounds and leaves. A round is prepared by the host, computed by the model
    within `entered`, and taken once its tokens are decided: on the device, where the host may be a round behind.
    Per-slot columns are the feature's own, at addresses that stay, with a row for `SlotState.spare`.
    """

    kind: type = type(None)
    """Of its column; the columns of a batch are found by it."""
    of_chunks = False
    """Whether it is about rows of prompts alone: batches without them do not ask it, nor enter it without a column."""
    captures = True
    """Whether graphs hold prompt chunks beside it; decodes are captured with every feature."""
    held_bytes = 0
    """Memory of its per-slot columns."""

    def admit(self, seq: Sequence) -> None:
        """Fill the columns of the slot that a sequence was given; called before its first round is prepared."""

    def leave(self, slot: int) -> None:
        """Let go of what is held for a slot, whose sequence has left it."""

    def replay_start(self, seq: Sequence, wanted: int) -> int | None:
        """Position at or before `wanted` from which a prompt can be computed again; None where that cannot be."""
        return wanted

    def reserve(self, num_rows: int) -> None:
        """Make room for what a pass leaves for `took`: captured rounds have at most so many rows of decodes."""

    def prepare(self, plan: SchedulerOutput) -> None:
        """Bring columns up to date for a round that is about to be launched."""

    def visible(self, chunk: Chunk) -> Tensor | None:
        """Which of a chunk's rows each of them sees: bool [1, length, length]; None is causal."""
        return None

    def positions(self, positions: Tensor, placed: Placed) -> Tensor:
        """By what rows are rotated, of their logical positions [1, num_rows]."""
        return positions

    def column(self, placed: Placed) -> Any | None:
        """Of `kind`, for the rows of a batch; None where no row needs it."""
        return None

    def entered(self, column: Any | None, inputs: dict[str, Any]) -> AbstractContextManager:
        """Entered while the model runs with these keyword arguments, which may be changed before."""
        return nullcontext()

    def took(self, accepted: AcceptedPaths) -> None:
        """Follow the accepted paths of the decodes in the latest pass; at shapes that the arguments decide."""

    def told(self, plan: SchedulerOutput) -> Mapping[str, Tensor]:
        """Values of a pass with prompt chunks that go to the host beside the round's tokens: int64, by name.

        `reported`: [num_reported_chunks, n], the bits of doubles: by chunk with a `report`, what it is made of.
        """
        return {}


class KeepingFeature(Feature, ABC):
    """A feature that keeps something of prefixes beside their keys and values, in tensors of one size."""

    marks: dict[str, int]
    """By request, another length of its prompt at which that is kept: where a saved prefix ends."""
    kept_bytes: int
    """Bytes kept of one prefix."""

    @abstractmethod
    def kept(self, block_id: int) -> dict[str, Tensor]:
        """Tensors kept behind a cached block, by name; raises KeyError where none are."""

    @abstractmethod
    def kept_like(self) -> dict[str, Tensor]:
        """Tensors of the shapes and types of `kept`."""

    @abstractmethod
    def put(self, block_id: int, parts: dict[str, Tensor]) -> bool:
        """Keep this behind a live block that is not cached yet; False where there is no room for it."""


def keeping(features: tuple[Feature, ...]) -> KeepingFeature | None:
    """Keeping feature of an engine; None where keys and values are all there is."""
    return next((feature for feature in features if isinstance(feature, KeepingFeature)), None)


def columns_of(features: tuple[Feature, ...], placed: Placed) -> Mapping[type, Any]:
    """What all of them add to a batch, by kind."""
    found = ((feature.kind, feature.column(placed)) for feature in features)
    return {kind: column for kind, column in found if column is not None}
