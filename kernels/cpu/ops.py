"""Python interface of the C++ kernels: converts tensors to pointers.

Tensors are float32 on the CPU unless stated otherwise. Weights, keys and values may have any dtype of `KINDS`; results
are computed in float32 and rounded when stored.
"""

import ctypes
import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.cpu import accept
from wingbeat.kernels.cpu.choice import NativeChoice
from wingbeat.kernels.cpu.draft_structs import BlockHead, Channel, Decided, Head, Roots, Sequences, declare_drafts
from wingbeat.kernels.cpu.drafted import DraftIntake, Shape, SlotTensors
from wingbeat.kernels.cpu.group_forms import LAYOUTS
from wingbeat.kernels.cpu.group_panels import GroupPanels
from wingbeat.kernels.cpu.library import NoLibraryError, kept_in, open_library
from wingbeat.kernels.cpu.panels import Panels
from wingbeat.kernels.cpu.structs import (
    KINDS,
    Batch,
    Heads,
    Matrix,
    Segment,
    declare,
)
from wingbeat.kernels.grouped_weight import GroupedWeight

logger = logging.getLogger(__name__)

CACHE_DTYPES = tuple(KINDS)
SWITCH = "WINGBEAT_CPU_KERNELS"
"""Environment variable, read at import; 0 disables the kernels."""
_used = os.environ.get(SWITCH) != "0"


class Segments(NamedTuple):
    """Segments of a batch in the C++ format, with the tensors that they point into."""

    kernels: "CpuKernels"
    array: ctypes.Array
    held: list[Tensor | None]

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float, **options: Any) -> Tensor:
        """Calls `CpuKernels.attend` with these segments."""
        return self.kernels.attend(query, key_cache, value_cache, self, scaling, **options)


class Addition(NamedTuple):
    """Function of an optional part of the kernels that adds to the results of layers' matrix products, for some rows of
    a batch.
    """

    add: int
    """Address of a C++ function of type `Add`."""
    rows: ctypes.Structure
    """Argument of `add` that describes the rows."""


class CpuKernels:
    """Functions of the compiled library.

    Args:
        folder: cache folder of compiled libraries.

    Raises:
        NoLibraryError: the library is unavailable.
    """

    def __init__(self, folder: Path) -> None:
        self.library = self._library = declare(open_library(folder))
        self._drafts = declare_drafts(self._library)
        self.num_threads = 1
        self.panel: int = self._library.wingbeat_panel()
        """Columns of a panel."""

    def use_threads(self, count: int) -> None:
        """Sets the number of threads that work on an operation, including the caller's."""
        if count != self.num_threads:
            self._library.wingbeat_threads(count)
            self.num_threads = count

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        """Multiplies rows [..., in] by a weight [in, out], both contiguous and of one dtype -> [..., out].

        Args:
            bias: float32 [out].
            wide: returns the float32 sums without rounding.

        Raises:
            ValueError: the rows' dtype differs from the weight's, or is not in `KINDS`.
        """
        if x.dtype != weight.dtype or x.dtype not in KINDS:
            raise ValueError(
                f"rows are {x.dtype} and weights {weight.dtype}: one of float32, bfloat16, float16 for both"
            )
        inputs, columns = weight.shape
        address = None if bias is None else bias.data_ptr()
        matrices = (Matrix * 1)(Matrix(weight.data_ptr(), address, columns, columns, 0, KINDS[weight.dtype], None))
        return self._product(x, inputs, matrices, columns, wide)

    def packed_linear(self, x: Tensor, panels: Panels | GroupPanels, *, wide: bool = False) -> Tensor:
        """`linear` with a packed weight and its bias. Results equal those of `linear` bit for bit.

        Raises:
            ValueError: the rows' dtype or width differs from the weight's.
        """
        _check_rows(x, panels)
        if panels.order is not None:
            x = x[..., panels.order]
        return self._product(x, panels.inputs, panels.matrices, sum(panels.parts), wide)

    def packed_linears(self, x: Tensor, panels: Sequence[GroupPanels]) -> Tensor:
        """`packed_linear` with several weights that have the same inputs; their output columns are concatenated."""
        if any(one.order is not None for one in panels):
            return torch.cat([self.packed_linear(x, one) for one in panels], dim=-1)
        _check_rows(x, panels[0])
        matrices = (Matrix * len(panels))(*(one.matrices[0] for one in panels))
        return self._product(x, panels[0].inputs, matrices, sum(one.parts[0] for one in panels), False)

    def pack_groups(self, weight: GroupedWeight, bias: Tensor | None = None, **more: Any) -> GroupPanels:
        """Packs a weight on the CPU into panels, as a copy.

        Args:
            bias: float32 [columns].
            more: further arguments of `GroupPanels.of`.
        """
        values, layout = weight.values, LAYOUTS[weight.form]
        columns, inputs = values.shape
        storage = values.new_zeros(-(-columns // self.panel), inputs // layout.inputs, layout.rows * self.panel)
        self._library.wingbeat_pack(
            values.data_ptr(), *values.stride(), columns, inputs, layout.kind, storage.data_ptr()
        )
        return GroupPanels.of(weight, storage, bias, self._library.wingbeat_columns, **more)

    def _product(self, x: Tensor, inputs: int, matrices: ctypes.Array, columns: int, wide: bool) -> Tensor:
        rows = x.float()
        out = rows.new_empty(*x.shape[:-1], columns)
        count = x.numel() // inputs
        self._library.wingbeat_product(rows.data_ptr(), count, inputs, matrices, len(matrices), out.data_ptr())
        return out if wide else out.to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm of each row of x [..., size] with a weight [size] of any dtype of `KINDS`."""
        # The copy is needed where rows are slices of wider rows, such as latents after a split.
        rows, wide = x.float().contiguous(), weight.float()
        out, size = torch.empty_like(rows), len(weight)
        self._library.wingbeat_norm(rows.data_ptr(), x.numel() // size, size, wide.data_ptr(), eps, out.data_ptr())
        return out.to(x.dtype)

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        segments: Segments,
        scaling: float,
        *,
        sliding_window: int = 0,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention for rows whose keys and values are already stored in the caches.

        Args:
            query: [num_tokens, num_heads, key_dim] in the caches' dtype.
            key_cache: [num_blocks, block_size, num_kv_heads, key_dim], contiguous, one of `CACHE_DTYPES`; `value_cache`
                likewise with value_dim.
            sliding_window: keys at this distance and beyond are hidden; 0 hides none.
            softcap: as for `wingbeat.kernels.attention.reference.tree_attention`; `sinks` likewise.

        Returns:
            [num_tokens, num_heads, value_dim] in the query's dtype.
        """
        num_tokens, num_heads, key_dim = query.shape
        value_dim = value_cache.shape[3]
        wide = query.float().contiguous()
        sinks = None if sinks is None else sinks.float().contiguous()
        out = wide.new_empty(num_tokens, num_heads, value_dim)
        heads = Heads(
            num_heads,
            key_cache.shape[2],
            key_dim,
            value_dim,
            scaling,
            softcap or 0.0,
            sliding_window,
            None if sinks is None else sinks.data_ptr(),
        )
        self._library.wingbeat_attention(
            ctypes.byref(heads),
            segments.array,
            len(segments.array),
            wide.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            KINDS[key_cache.dtype],
            key_cache.shape[1],
            out.data_ptr(),
        )
        return out.to(query.dtype)

    def run_layers(self, layers: ctypes.Array, first: int, count: int, batch: Batch, x: Tensor, out: Tensor) -> None:
        """Runs `count` consecutive decoder layers, beginning with layer `first`.

        Args:
            layers: array of `Layer`.
            x: [num_tokens, hidden_size], contiguous, in the layers' dtype: input of the first layer.
            out: [count, num_tokens, hidden_size], likewise: output of each layer.
        """
        self._library.wingbeat_layers(
            ctypes.byref(layers[first]), count, ctypes.byref(batch), x.data_ptr(), out.data_ptr()
        )

    def tree_acceptance(
        self, committed_lens: Tensor, last_token_ids: Tensor, compacted: accept.Compacted | None = None
    ) -> accept.TreeAcceptance:
        """Creates a `TreeAcceptance` that updates these columns, int64 [num_slots], when a path is accepted."""
        return accept.TreeAcceptance(self._library, committed_lens, last_token_ids, compacted)

    def native_choice(self) -> NativeChoice:
        """Creates a `NativeChoice`, which chooses tokens from rows of logits."""
        return NativeChoice(self._library)

    def draft_intake(self, present: SlotTensors, shape: Shape) -> DraftIntake:
        """Creates a `DraftIntake`, which checks drafted trees and lays them out."""
        return DraftIntake(self._library, present, shape)

    def take_in(self, head: Head | BlockHead, sequences: Sequences, decided: Decided) -> None:
        """Runs a head over decided pairs.

        Stores keys and values, and for an EAGLE head each sequence's last hidden state.
        """
        self._drafts[type(head)].take_in(*map(ctypes.byref, (head, sequences, decided)))

    def grow(self, head: Head | BlockHead, sequences: Sequences, roots: Roots) -> int:
        """Grows a tree from each root. Returns the number of levels grown."""
        return self._drafts[type(head)].grow(*map(ctypes.byref, (head, sequences, roots)))

    def answer_round(self, head: Head | BlockHead, sequences: Sequences, channel: Channel) -> bool:
        """Runs `take_in` and `grow` for a round of a channel.

        Returns False, having done nothing, if the outcome does not fit the channel.
        """
        return self._drafts[type(head)].answer(*map(ctypes.byref, (head, sequences, channel))) != 0


def _check_rows(x: Tensor, panels: Panels | GroupPanels) -> None:
    """Raises ValueError if a matrix product would read past the end of the rows."""
    if x.dtype != panels.dtype:
        raise ValueError(f"rows are {x.dtype} and weights {panels.dtype}: both must have the same dtype")
    if x.shape[-1] != panels.inputs:
        raise ValueError(f"rows have {x.shape[-1]} elements, but the weight has {panels.inputs} inputs")


def pack_segments(segments: list[Any], dtype: torch.dtype) -> Segments | None:
    """Converts segments to the C++ format.

    Returns None if there are no kernels, if the segments are on another device, or if the dtype is unsupported.

    Args:
        segments: objects with the fields of `wingbeat.runtime.round.rows.Segment`; positions may be None if the new
            rows of each request follow the request's context directly.
        dtype: dtype of keys and values.
    """
    kernels = cpu_kernels() if dtype in CACHE_DTYPES and segments[0].block_tables.is_cpu else None
    if kernels is None:
        return None
    kernels.use_threads(torch.get_num_threads())
    array = (Segment * len(segments))()
    held: list[Tensor | None] = []
    for made, segment in zip(array, segments, strict=True):
        tables, positions, mask = segment.block_tables, segment.positions, segment.mask_words
        context = segment.num_context.contiguous()
        made.start, made.num_reqs, made.num_query = segment.start, len(tables), segment.num_query
        made.tables, made.table_stride, made.width = tables.data_ptr(), tables.stride(0), tables.shape[1]
        made.context, made.num_new = context.data_ptr(), segment.num_query
        if positions is not None:
            made.num_new = positions.shape[1]
            made.positions, made.position_stride = positions.data_ptr(), positions.stride(0)
        if mask is not None:
            mask = mask.contiguous()
            made.mask, made.mask_stride, made.mask_words = mask.data_ptr(), mask.stride(0), mask.shape[2]
        if segment.row_starts is not None:
            made.row_starts = segment.row_starts.data_ptr()
        held += [tables, context, positions, mask, segment.row_starts]
    return Segments(kernels, array, held)


def norm_rows(hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`wingbeat.kernels.layer.reference.add_rms_norm` on the CPU; ignores `residual`, which must be None."""
    kernels = cpu_kernels()
    if kernels is None:
        return torch.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), eps), hidden
    return kernels.rms_norm(hidden, weight, eps), hidden


def batch_of(
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    segments: Segments,
    block_size: int,
    addition: Addition | None = None,
) -> Batch:
    """Describes the rows of a forward pass. The caller keeps the tensors and the addition alive.

    Args:
        cos: [num_tokens, dim], contiguous; `sin` likewise.
        slot_mapping: int64 [num_tokens], contiguous.
        addition: added to matrix products of the layers.
    """
    return Batch(
        len(slot_mapping),
        block_size,
        cos.data_ptr(),
        sin.data_ptr(),
        slot_mapping.data_ptr(),
        segments.array,
        len(segments.array),
        None if addition is None else addition.add,
        None if addition is None else ctypes.addressof(addition.rows),
    )


def cpu_kernels() -> CpuKernels | None:
    """Returns the kernels; None if they are disabled or unavailable, or while a torch dispatch mode is active.

    A dispatch mode, such as one that records a graph, would miss operations that bypass torch.
    """
    if not _used or torch._C._len_torch_dispatch_stack():
        return None
    return _opened()


def use_kernels(wanted: bool) -> bool:
    """Enables or disables the kernels, regardless of the environment; returns the previous setting."""
    global _used
    _used, before = wanted, _used
    return before


@cache
def _opened() -> CpuKernels | None:
    try:
        return CpuKernels(kept_in())
    except NoLibraryError as error:
        logger.warning("CPU kernels are unavailable, torch operations run instead: %s", error)
        return None
