"""Rows of a forward pass: decodes, the flattened batch of decodes and prompt chunks, and the interface of features.

A feature (adapters, spans, recurrent state, ...) adds columns to the rows, and context managers that enclose the model
call. Code that builds and runs batches handles features through this interface only; features that an engine lacks cost
no time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
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
    """Device inputs of a round's decodes: tensors [num_reqs] or [num_reqs, num_nodes]."""

    slots: Tensor
    roots: Tensor
    token_ids: Tensor
    tree: TokenTree | None
    """Draft trees; None for bare roots."""
    positions: Tensor
    slot_mapping: Tensor
    tables: Tensor | None = field(default=None, kw_only=True)
    """int64 [num_reqs, max_blocks_per_seq]: block tables of the decodes, if the kernel has already gathered them; else
    None."""

    def packed(self, padded: Tensor) -> Tensor:
        """Reshapes [num_reqs, num_nodes, ...] to rows of the flattened batch."""
        return padded.flatten(0, 1)

    def padded(self, rows: Tensor) -> Tensor:
        """Reshapes the decodes' rows, which are the first in `rows` [num_rows or more, n], to [num_reqs, num_nodes, n].

        Entries for padding nodes hold arbitrary values.
        """
        shape = self.token_ids.shape
        return rows[: shape.numel()].unflatten(0, shape)

    def rows_of(self, nodes: Tensor) -> Tensor:
        """Returns the row in the flattened batch for each node index in `nodes` [num_reqs, n]."""
        return nodes + torch.arange(len(nodes), device=nodes.device)[:, None] * self.token_ids.shape[1]

    @property
    def num_rows(self) -> int:
        """Number of decode rows in the flattened batch."""
        return self.token_ids.numel()


ROWS_KEYWORD = "wingbeat_batch"
"""Name of the keyword argument by which a model's layers receive the batch."""
NO_COLUMNS: Mapping[type, Any] = {}


class Segment(NamedTuple):
    """Rows of the flattened batch that share a shape: all decodes, one prompt chunk, or all pieces of chunks."""

    start: int
    """First row in the flattened batch."""
    num_reqs: int
    num_query: int
    """Number of rows of each request; the maximum, if `row_starts` is set and requests differ in their number of rows.
    """
    block_tables: Tensor
    """int64 [num_reqs, num_table_blocks]"""
    num_context: Tensor
    """int64 [num_reqs]: number of tokens before the first new row; row j is stored at num_context + j. For negative
    values, see `tree_attention`."""
    positions: Tensor
    """int64 [num_reqs, num_new]: logical positions of the new rows; the queries are the last num_query rows."""
    mask_words: Tensor | None = None
    """int64 [num_reqs, num_query, ceil(num_new / 64)], packed by `kernels.tree.reference.pack_mask`; None for causal
    attention."""
    row_starts: Tensor | None = None
    """int64 [num_reqs + 1]: first row of each request, relative to `start`, if requests differ in their number of rows,
    which occurs on CPUs only."""

    @classmethod
    def of(
        cls, start: int, positions: Tensor, num_context: Tensor, visible: Tensor | None, block_tables: Tensor
    ) -> "Segment":
        """Returns a segment whose rows attend to the context and to the new rows for which `visible` is True.

        Args:
            positions: int64 [num_reqs, num_query], logical positions.
            visible: bool [num_reqs, num_query, num_query]; None for causal attention, with row j at position
                num_context + j.
        """
        # A single row attends to the context and to itself, so its attention is causal.
        words = None if visible is None or positions.shape[1] == 1 else pack_mask(visible)
        return cls(start, *positions.shape, block_tables, num_context, positions, words)


class PackedSegments(Protocol):
    """Segments of a batch in the layout that the kernels of a runtime part (`runtime.parts`) read."""

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float, /, **options: Any
    ) -> Tensor:
        """Computes the attention of rows whose keys and values are already stored.

        See `verifier.layers.attention.attend_segments`.
        """
        ...


class Rows(NamedTuple):
    """Rows of one forward pass: first the rows of decodes, then the rows of prompt chunks.

    The model's layers also receive this object.
    """

    token_ids: Tensor
    """int64 [1, num_tokens]"""
    positions: Tensor
    """int64 [1, num_tokens], logical positions (by depth in trees); [3, 1, num_tokens] for models with three rotary
    positions per token."""
    slot_mapping: Tensor
    """int64 [num_tokens]: KV pool address to which each row's KV is written."""
    segments: list[Segment]
    caches: list[tuple[Tensor, Tensor]]
    """(key_cache, value_cache) by layer."""
    logits_rows: Tensor | None = None
    """int64 [num_rows]: rows whose logits are needed; None for all rows."""
    columns: Mapping[type, Any] = NO_COLUMNS
    """Columns that features add, by `Feature.kind`."""
    around: tuple[Callable[[dict[str, Any]], AbstractContextManager], ...] = ()
    """Functions that return a context manager to enclose the model call; each function gets the model's keyword
    arguments."""
    chunk_rows: Tensor | None = None
    """int64 [num_chunk_tokens]: rows of prompt tokens, counted from the first row after the decodes; None if the chunk
    rows have no padding."""
    captured: dict[int, Tensor] | None = None
    """Tensors by layer; a pass fills each tensor with the layer's keys and values of all rows, [num_tokens, heads *
    (key_dim + value_dim)].
    """
    packed: PackedSegments | None = None
    """Segments in the layout that the attention kernels of a runtime part read; None if `verifier.layers.attention`
    computes attention."""
    into: "ModelOutput | None" = None
    """Memory in which the model may place its output."""
    replayed: Tensor | None = None
    """int64 [num_tokens]: KV pool address of each row of a replay, 0 for other rows; None if no feature has
    `stores_replays`."""
    elsewhere: "Elsewhere | None" = None
    """Layers whose keys and values have other addresses; None if all layers have the same addresses."""

    def of_layer(self, layer: int) -> "Rows":
        """Returns the rows with the addresses of this layer's keys and values: `slot_mapping`, `segments`, `packed`."""
        other = self.elsewhere
        return self if other is None or layer not in other.layers else other.rows


class Elsewhere(NamedTuple):
    """Layers whose keys and values have other addresses than those of the block tables."""

    layers: frozenset[int]
    rows: Rows
    """The batch's rows with these addresses."""


def joined(parts: list[Rows]) -> Rows:
    """Concatenates parts of a batch; the `start` of each segment must already count the rows of earlier parts.

    Fields that are not concatenated are taken from the first part.
    """
    if len(parts) == 1:
        return parts[0]
    return parts[0]._replace(
        token_ids=torch.cat([part.token_ids for part in parts], dim=1),
        positions=torch.cat([part.positions for part in parts], dim=1),
        slot_mapping=torch.cat([part.slot_mapping for part in parts]),
        segments=[segment for part in parts for segment in part.segments],
        replayed=None if parts[-1].replayed is None else torch.cat([_replayed(part) for part in parts]),
    )


def _replayed(rows: Rows) -> Tensor:
    return torch.zeros_like(rows.slot_mapping) if rows.replayed is None else rows.replayed


class Pruner(Protocol):
    """Chooses, on the device, the nodes of a round's trees that are most likely to be accepted.

    Only the chosen nodes are verified.
    """

    def follow(self, plan: SchedulerOutput) -> None:
        """Stores the sequences of a round, before the round's trees are pruned."""
        ...

    def prune(self, trees: TokenTree, slots: Tensor, num_nodes: int) -> tuple[TokenTree, Tensor]:
        """Keeps the root and the best num_nodes - 1 drafted nodes of each tree, in unchanged order.

        Args:
            trees: [num_reqs, num_drafted]; a tree that must not be verified has only its root as a valid node.
            slots: int64 [num_reqs].
            num_nodes: number of columns of the result.

        Returns:
            The pruned trees, and as evidence the nodes before pruning, packed: int64 [num_reqs, num_drafted].
        """
        ...

    def verified_nodes(self, evidence: Tensor, num_nodes: int) -> Tensor:
        """Index that each verified node had before pruning: int64 [num_reqs, num_nodes]; padding is the last drafted
        node."""
        ...


class ModelOutput(NamedTuple):
    """Output of a forward pass."""

    logits: Tensor
    """float [num_rows, vocab_size]"""
    taps: Tensor | None
    """[num_tokens, taps_size]: inputs of the tapped layers (residual stream), lowest layer first, then keys and values
    of the layers whose KV the drafter reads."""

    def split(self, num_rows: int) -> "tuple[ModelOutput, ModelOutput]":
        """Splits the output after the first `num_rows` rows, all of which must have logits."""
        logits, taps = self
        before, behind = (None, None) if taps is None else (taps[:num_rows], taps[num_rows:])
        return ModelOutput(logits[:num_rows], before), ModelOutput(logits[num_rows:], behind)


Model = Callable[[Rows], ModelOutput]
"""Function that runs a batch and writes the rows' keys and values into the batch's caches."""


class Placed:
    """Sequences and chunks to which a batch's rows belong: first decodes, then prompt chunks.

    Args:
        plan: plan of the round; None for a captured batch, which must not depend on values on the host.
        decodes: decode inputs; None in a batch without decodes.
        chunk_slots: function that returns the slots of the chunk rows, int64 [num_chunk_rows]; None in a batch without
            chunks.
        starts: row in the batch of the first token of each chunk of the plan.
        on_host: whether tensors are on the CPU and can be read without waiting.
        lean: whether features that can be absent are left out.
    """

    def __init__(
        self,
        plan: SchedulerOutput | None,
        decodes: Decodes | None,
        chunk_slots: Callable[[], Tensor] | None,
        starts: list[int],
        on_host: bool,
        lean: bool = False,
    ) -> None:
        self.plan, self.decodes, self.starts, self.on_host, self.lean = plan, decodes, starts, on_host, lean
        self._chunk_slots = chunk_slots

    @cached_property
    def slots(self) -> Tensor:
        """Slot of each row's sequence: int64 [num_rows]."""
        parts = []
        if self.decodes is not None:
            parts.append(self.decodes.packed(self.decodes.slots[:, None].expand_as(self.decodes.token_ids)))
        if self._chunk_slots is not None:
            parts.append(self._chunk_slots())
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Feature:
    """Base class of features of an engine's batches; this class does nothing.

    `admit` is called when a sequence gets a slot, and `leave` when the sequence has left the slot. In between, each
    round is prepared on the host (`prepare`) and computed by the model within `entered`. Once the round's tokens are
    chosen on the device, `took` is called, while the host may not yet have these tokens. A feature owns its columns by
    slot, which have fixed addresses and a row for `SlotState.spare`.
    """

    kind: type = type(None)
    """Type of the feature's column, and its key in `Rows.columns`."""
    of_chunks = False
    """Whether the feature concerns only prompt chunks. Such a feature is skipped in batches without chunks, and
    `entered` is called only if the batch has its column."""
    captures = True
    """Whether prompt chunks can be captured with this feature; decodes are captured with every feature."""
    can_be_absent = False
    """Whether lean rounds, in which no sequence uses the feature, are computed without the feature."""
    held_bytes = 0
    """Bytes of the columns by slot."""
    stores_replays = False
    """Whether the feature needs `Rows.replayed`."""

    def admit(self, seq: Sequence) -> None:
        """Fills the columns of a newly admitted sequence's slot; called before its first round is prepared."""

    def leave(self, slot: int) -> None:
        """Frees the state held for a slot whose sequence has left."""

    def replay_start(self, seq: Sequence, wanted: int) -> int | None:
        """Returns the latest position, at most `wanted`, from which a prompt can be recomputed.

        Returns None if the prompt cannot be recomputed.
        """
        return wanted

    def reserve(self, num_rows: int) -> None:
        """Allocates the memory in which a captured pass of at most `num_rows` decode rows keeps data for `took`."""

    def prepare(self, plan: SchedulerOutput) -> None:
        """Updates the feature's columns for a round that is about to be launched."""

    def is_used(self, plan: SchedulerOutput) -> bool:
        """Whether a sequence of a round uses the feature; called only if the feature `can_be_absent`."""
        return True

    def visible(self, chunk: Chunk) -> Tensor | None:
        """Returns the attention mask over a chunk's rows, bool [1, length, length]; None for causal attention."""
        return None

    def positions(self, positions: Tensor, placed: Placed) -> Tensor:
        """Returns the rotary positions of rows, given their logical positions [1, num_rows]."""
        return positions

    def column(self, placed: Placed) -> Any | None:
        """Returns the feature's column, of type `kind`, for the rows of a batch; None if no row needs a column."""
        return None

    def relocated(self, rows: Rows) -> Rows:
        """Returns a batch's rows; a feature that keeps KV of some layers elsewhere adds `Rows.elsewhere`."""
        return rows

    def entered(self, column: Any | None, inputs: dict[str, Any]) -> AbstractContextManager:
        """Returns a context manager that encloses the model call; may change `inputs`, the call's keyword arguments."""
        return nullcontext()

    def took(self, accepted: AcceptedPaths) -> None:
        """Updates the feature's columns according to the accepted paths of the latest pass's decodes.

        Tensor shapes must depend on the arguments' shapes alone, so that the method can be captured.
        """

    def reported_values(self, plan: SchedulerOutput) -> Mapping[str, Tensor]:
        """Returns int64 tensors by name, which are downloaded with the tokens of a round that has prompt chunks.

        The tensor named `reported`, [num_reported_chunks, n], holds a row for each chunk with a `report`: the values
        from which a `PromptReport` is made, as bits of float64.
        """
        return {}


class KeepingFeature(Feature, ABC):
    """Feature that stores tensors of fixed size for cached prefixes, in addition to the prefixes' keys and values."""

    marks: dict[str, int]
    """By request id, an additional prompt length at which the tensors are stored, because a saved prefix ends there."""
    kept_bytes: int
    """Bytes stored for one prefix, at most."""

    @abstractmethod
    def kept(self, blocks: SequenceOf[int]) -> dict[str, Tensor]:
        """Returns the tensors stored for a cached prefix, by name; raises KeyError if none are stored."""

    @abstractmethod
    def kept_like(self, num_blocks: int) -> dict[str, Tensor]:
        """Returns tensors with the names, shapes and dtypes of those that `kept` returns for a prefix of `num_blocks`
        blocks, but with arbitrary values."""

    @abstractmethod
    def put(self, blocks: SequenceOf[int], parts: dict[str, Tensor]) -> bool:
        """Stores tensors for a prefix of blocks in use that are not cached yet.

        Returns False if no memory is free for these tensors.
        """


def keeping(features: tuple[Feature, ...]) -> KeepingFeature | None:
    """Returns the engine's `KeepingFeature`; None if the engine has none."""
    return next((feature for feature in features if isinstance(feature, KeepingFeature)), None)


def columns_of(features: tuple[Feature, ...], placed: Placed) -> Mapping[type, Any]:
    """Returns the columns that the features add to a batch, by `Feature.kind`."""
    found = ((feature.kind, feature.column(placed)) for feature in features)
    return {kind: column for kind, column in found if column is not None}
