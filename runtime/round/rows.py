"""Rows of a forward pass: decodes, the flattened batch of decodes and prompt chunks, and the interface of features.

A feature (adapters, spans, recurrent state, ...) adds columns beside the rows and context managers around the model
call. Code that builds and runs batches handles features by this interface only; a feature that an engine lacks costs
nothing.
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
    """Device inputs of a round's decodes: tensors [num_reqs] or [num_reqs, num_nodes]."""

    slots: Tensor
    roots: Tensor
    token_ids: Tensor
    tree: TokenTree | None
    """None for bare roots."""
    positions: Tensor
    slot_mapping: Tensor
    tables: Tensor | None = field(default=None, kw_only=True)
    """int64 [num_reqs, max_blocks_per_seq]: block tables of the decodes, where the kernel gathered them already."""

    def packed(self, padded: Tensor) -> Tensor:
        """Reshapes [num_reqs, num_nodes, ...] to rows of the flattened batch."""
        return padded.flatten(0, 1)

    def padded(self, rows: Tensor) -> Tensor:
        """Reshapes the batch's leading rows [num_rows or more, n], which are the decodes', to [num_reqs, num_nodes, n].

        Padding rows hold arbitrary values.
        """
        shape = self.token_ids.shape
        return rows[: shape.numel()].unflatten(0, shape)

    def rows_of(self, nodes: Tensor) -> Tensor:
        """Row in the flattened batch of each node [num_reqs, n]."""
        return nodes + torch.arange(len(nodes), device=nodes.device)[:, None] * self.token_ids.shape[1]

    @property
    def num_rows(self) -> int:
        """Number of decode rows in the flattened batch."""
        return self.token_ids.numel()


ROWS_KEYWORD = "wingbeat_batch"
"""Keyword argument by which a model's layers receive the batch."""
NO_COLUMNS: Mapping[type, Any] = {}


class Segment(NamedTuple):
    """Rows of the flattened batch that share a shape: all decodes, one prompt chunk, or all pieces of chunks."""

    start: int
    """First row in the flattened batch."""
    num_reqs: int
    num_query: int
    """Rows of each request; the maximum where `row_starts` lists the rows of each."""
    block_tables: Tensor
    """int64 [num_reqs, num_table_blocks]"""
    num_context: Tensor
    """int64 [num_reqs]: tokens before the first new row; row j is stored at num_context + j. Negative values mean what
    they mean in `tree_attention`."""
    positions: Tensor
    """int64 [num_reqs, num_new]: logical positions of the new rows; the queries are the last num_query of these."""
    mask_words: Tensor | None = None
    """int64 [num_reqs, num_query, ceil(num_new / 64)], packed by `kernels.tree.reference.pack_mask`; None for causal
    attention."""
    row_starts: Tensor | None = None
    """int64 [num_reqs + 1]: first row of each request, relative to `start`, where requests differ in length; on CPUs
    only."""

    @classmethod
    def of(
        cls, start: int, positions: Tensor, num_context: Tensor, visible: Tensor | None, block_tables: Tensor
    ) -> "Segment":
        """Segment whose rows attend to the context and to the new rows that a mask shows.

        Args:
            positions: int64 [num_reqs, num_query], logical positions.
            visible: bool [num_reqs, num_query, num_query]; None for causal attention, with row j at position
                num_context + j.
        """
        # A single row attends to the context and itself, which is causal attention.
        words = None if visible is None or positions.shape[1] == 1 else pack_mask(visible)
        return cls(start, *positions.shape, block_tables, num_context, positions, words)


class PackedSegments(Protocol):
    """Segments of a batch in the layout that a part's own kernels read."""

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float, /, **options: Any
    ) -> Tensor:
        """Attention of rows whose keys and values are stored already.

        See `verifier.layers.attention.attend_segments`.
        """
        ...


class Rows(NamedTuple):
    """Rows of one forward pass: decodes first, prompt chunks behind them. A model's layers receive it as well."""

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
    """int64 [num_rows]: rows whose logits are needed; None for all."""
    columns: Mapping[type, Any] = NO_COLUMNS
    """Columns that features add, by the feature's kind."""
    around: tuple[Callable[[dict[str, Any]], AbstractContextManager], ...] = ()
    """Makers of context managers that are entered around the model call; each gets the model's keyword arguments."""
    chunk_rows: Tensor | None = None
    """int64 [num_chunk_tokens]: rows of prompt tokens, behind the decodes'; None where the chunk rows have no
    padding."""
    captured: dict[int, Tensor] | None = None
    """Output tensors by layer, filled with the rows' keys and values [num_tokens, heads * (key_dim + value_dim)] of
    these layers."""
    packed: PackedSegments | None = None
    """Segments in the layout of a part's own kernels; None where `verifier.layers.attention` computes attention."""
    into: "ModelOutput | None" = None
    """Memory in which the model may place its output."""


def joined(parts: list[Rows]) -> Rows:
    """Concatenates parts of a batch, in which segments already start at their final rows.

    Other fields are the first part's.
    """
    if len(parts) == 1:
        return parts[0]
    return parts[0]._replace(
        token_ids=torch.cat([part.token_ids for part in parts], dim=1),
        positions=torch.cat([part.positions for part in parts], dim=1),
        slot_mapping=torch.cat([part.slot_mapping for part in parts]),
        segments=[segment for part in parts for segment in part.segments],
    )


class Pruner(Protocol):
    """Chooses on the device which nodes of a round's trees are verified, by the chance that they are accepted."""

    def follow(self, plan: SchedulerOutput) -> None:
        """Notes the sequences of a round, before its trees are pruned."""
        ...

    def prune(self, trees: TokenTree, slots: Tensor, num_nodes: int) -> tuple[TokenTree, Tensor]:
        """Keeps the root and the best num_nodes - 1 drafted nodes of each tree, in their order.

        Args:
            trees: [num_reqs, num_drafted]; a tree that must not be verified has one valid node.
            slots: int64 [num_reqs].
            num_nodes: width of the result.

        Returns:
            The pruned trees, and as evidence the nodes before pruning, packed: int64 [num_reqs, num_drafted].
        """
        ...

    def verified_nodes(self, evidence: Tensor, num_nodes: int) -> Tensor:
        """Index before pruning of each verified node: int64 [num_reqs, num_nodes]; padding is the last drafted node."""
        ...


class ModelOutput(NamedTuple):
    """Output of a forward pass."""

    logits: Tensor
    """float [num_rows, vocab_size]"""
    taps: Tensor | None
    """[num_tokens, taps_size]: residual stream entering the tapped layers, lowest layer first, then keys and values."""

    def split(self, num_rows: int) -> "tuple[ModelOutput, ModelOutput]":
        """Splits off the output of the first `num_rows` rows, all of which have logits."""
        logits, taps = self
        before, behind = (None, None) if taps is None else (taps[:num_rows], taps[num_rows:])
        return ModelOutput(logits[:num_rows], before), ModelOutput(logits[num_rows:], behind)


Model = Callable[[Rows], ModelOutput]
"""Runs a batch and writes its keys and values into the batch's caches."""


class Placed:
    """Origin of a batch's rows: decodes first, then prompt chunks.

    Args:
        plan: None for a captured batch, which must not depend on values on the host.
        decodes: None in a batch without decodes.
        chunk_slots: returns int64 [num_chunk_rows], the slots of the chunk rows; None in a batch without chunks.
        starts: row in the batch of each chunk's first token, by chunk of the plan.
        on_host: whether tensors are on the CPU and can be read without waiting.
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
        """Slot of each row's sequence: int64 [num_rows]."""
        parts = []
        if self.decodes is not None:
            parts.append(self.decodes.packed(self.decodes.slots[:, None].expand_as(self.decodes.token_ids)))
        if self._chunk_slots is not None:
            parts.append(self._chunk_slots())
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Feature:
    """Base class of features of an engine's batches; this class does nothing.

    A sequence is admitted, takes part in rounds and leaves. A round is prepared on the host, computed by the model
    within `entered`, and passed to `took` once its tokens are decided: on the device, while the host may be one round
    behind. A feature owns its per-slot columns; these have fixed addresses and a row for `SlotState.spare`.
    """

    kind: type = type(None)
    """Type of the feature's column, and its key in `Rows.columns`."""
    of_chunks = False
    """Whether the feature concerns prompt chunks alone: batches without chunks skip it, and it is entered only with a
    column."""
    captures = True
    """Whether prompt chunks can be captured with this feature; decodes are captured with every feature."""
    held_bytes = 0
    """Bytes of the per-slot columns."""

    def admit(self, seq: Sequence) -> None:
        """Fills the columns of a newly admitted sequence's slot; called before its first round is prepared."""

    def leave(self, slot: int) -> None:
        """Frees what is held for a slot whose sequence has left."""

    def replay_start(self, seq: Sequence, wanted: int) -> int | None:
        """Latest position at or before `wanted` from which a prompt can be recomputed.

        None if recomputing is impossible.
        """
        return wanted

    def reserve(self, num_rows: int) -> None:
        """Allocates what a pass keeps for `took`; captured rounds have at most `num_rows` decode rows."""

    def prepare(self, plan: SchedulerOutput) -> None:
        """Updates columns for a round that is about to be launched."""

    def visible(self, chunk: Chunk) -> Tensor | None:
        """Mask over a chunk's rows: bool [1, length, length]; None for causal attention."""
        return None

    def positions(self, positions: Tensor, placed: Placed) -> Tensor:
        """Rotary positions of rows, from their logical positions [1, num_rows]."""
        return positions

    def column(self, placed: Placed) -> Any | None:
        """Column of type `kind` for the rows of a batch; None where no row needs it."""
        return None

    def entered(self, column: Any | None, inputs: dict[str, Any]) -> AbstractContextManager:
        """Context manager around the model call; may change the call's keyword arguments before it."""
        return nullcontext()

    def took(self, accepted: AcceptedPaths) -> None:
        """Follows the accepted paths of the latest pass's decodes.

        Shapes must depend on the arguments' shapes alone.
        """

    def told(self, plan: SchedulerOutput) -> Mapping[str, Tensor]:
        """Values of a pass with prompt chunks that are downloaded with the round's tokens: int64 tensors by name.

        `reported`: [num_reported_chunks, n], bits of float64: the values from which a `PromptReport` is made, for each
        chunk with a `report`.
        """
        return {}


class KeepingFeature(Feature, ABC):
    """Feature that stores tensors of fixed size for cached prefixes, beside their keys and values."""

    marks: dict[str, int]
    """Further prompt length at which the tensors are stored, where a saved prefix ends; by request id."""
    kept_bytes: int
    """Bytes stored for one prefix."""

    @abstractmethod
    def kept(self, block_id: int) -> dict[str, Tensor]:
        """Tensors stored behind a cached block, by name; raises KeyError if there are none."""

    @abstractmethod
    def kept_like(self) -> dict[str, Tensor]:
        """Tensors with the shapes and types of those that `kept` returns."""

    @abstractmethod
    def put(self, block_id: int, parts: dict[str, Tensor]) -> bool:
        """Stores tensors behind a live block that is not cached yet; returns False if there is no room."""


def keeping(features: tuple[Feature, ...]) -> KeepingFeature | None:
    """The engine's `KeepingFeature`; None if it has none."""
    return next((feature for feature in features if isinstance(feature, KeepingFeature)), None)


def columns_of(features: tuple[Feature, ...], placed: Placed) -> Mapping[type, Any]:
    """Columns that the features add to a batch, by kind."""
    found = ((feature.kind, feature.column(placed)) for feature in features)
    return {kind: column for kind, column in found if column is not None}
