"""Python's side of the C++: tensors in, pointers out.

Tensors are float32 on the CPU unless it says otherwise. Weights, keys and values may be of any of `KINDS`: what is made
of them is summed in float32, and rounded where it is stored.
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
from wingbeat.kernels.cpu.drafted import DraftIntake, Present, Shape
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
"""Environment variable, read when this is imported; 0 leaves the kernels out."""
_used = os.environ.get(SWITCH) != "0"


class Segments(NamedTuple):
    """Segments of a batch as C++ reads them, and the tensors that they point into."""

    kernels: "CpuKernels"
    array: ctypes.Array
    held: list[Tensor | None]

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float, **options: Any) -> Tensor:
        """`CpuKernels.attend` of these."""
        return self.kernels.attend(query, key_cache, value_cache, self, scaling, **options)


class Addition(NamedTuple):
    """Addition of a part of the kernels to products of layers, for some rows of a batch."""

    add: int
    """Address of an `Add`."""
    rows: ctypes.Structure
    """Which rows, as that reads them."""


class CpuKernels:
    """The functions of the library.

    Args:
        folder: where it is kept.

    Raises:
        NoLibraryError: it is not to be had.
    """

    def __init__(self, folder: Path) -> None:
        self.library = self._library = declare(open_library(folder))
        self._drafts = declare_drafts(self._library)
        self.num_threads = 1
        self.panel: int = self._library.wingbeat_panel()
        """Columns of a panel."""

    def use_threads(self, count: int) -> None:
        """Let so many threads work, the caller's included."""
        if count != self.num_threads:
            self._library.wingbeat_threads(count)
            self.num_threads = count

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        """[..., in] times a weight [in, out], both contiguous and of one dtype -> [..., out].

        Args:
            bias: float32 [out].
            wide: leave the sums in float32.

        Raises:
            ValueError: the rows' dtype is another one than the weight's, or none of `KINDS`.
        """
        if x.dtype != weight.dtype or x.dtype not in KINDS:
            raise ValueError(f"rows are {x.dtype} and weights {weight.dtype}: one dtype of float32, bfloat16, float16")
        inputs, columns = weight.shape
        address = None if bias is None else bias.data_ptr()
        matrices = (Matrix * 1)(Matrix(weight.data_ptr(), address, columns, columns, 0, KINDS[weight.dtype], None))
        return self._product(x, inputs, matrices, columns, wide)

    def packed_linear(self, x: Tensor, panels: Panels | GroupPanels, *, wide: bool = False) -> Tensor:
        """`linear` by a packed weight and its bias; the sums are the same, bit for bit.

        Raises:
            ValueError: the rows' dtype or width is another one than the weight's.
        """
        _check_rows(x, panels)
        if panels.order is not None:
            x = x[..., panels.order]
        return self._product(x, panels.inputs, panels.matrices, sum(panels.parts), wide)

    def packed_linears(self, x: Tensor, panels: Sequence[GroupPanels]) -> Tensor:
        """`packed_linear` by several weights of the same inputs, their columns side by side."""
        if any(one.order is not None for one in panels):
            return torch.cat([self.packed_linear(x, one) for one in panels], dim=-1)
        _check_rows(x, panels[0])
        matrices = (Matrix * len(panels))(*(one.matrices[0] for one in panels))
        return self._product(x, panels[0].inputs, matrices, sum(one.parts[0] for one in panels), False)

    def pack_groups(self, weight: GroupedWeight, bias: Tensor | None = None) -> GroupPanels:
        """A copy of a weight on the CPU, in panels.

        Args:
            bias: float32 [columns].
        """
        values, layout = weight.values, LAYOUTS[weight.form]
        columns, inputs = values.shape
        storage = values.new_zeros(-(-columns // self.panel), inputs // layout.inputs, layout.rows * self.panel)
        self._library.wingbeat_pack(
            values.data_ptr(), *values.stride(), columns, inputs, layout.kind, storage.data_ptr()
        )
        return GroupPanels.of(weight, storage, bias, self._library.wingbeat_columns)

    def _product(self, x: Tensor, inputs: int, matrices: ctypes.Array, columns: int, wide: bool) -> Tensor:
        rows = x.float()
        out = rows.new_empty(*x.shape[:-1], columns)
        count = x.numel() // inputs
        self._library.wingbeat_product(rows.data_ptr(), count, inputs, matrices, len(matrices), out.data_ptr())
        return out if wide else out.to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm of each row of x [..., size] by a weight [size], in any dtype of `KINDS`."""
        # Rows may be part of wider ones, such as the latents that a split leaves.
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
        """Attention of rows whose keys and values are stored.

        Args:
            query: [num_tokens, num_heads, key_dim] in the dtype of the caches.
            key_cache: [num_blocks, block_size, num_kv_heads, key_dim], contiguous, one of `CACHE_DTYPES`;
                `value_cache` likewise with value_dim.
            sliding_window: keys at this distance and beyond are hidden; 0 hides none.
            softcap: as for `wingbeat.kernels.attention.reference.tree_attention`; `sinks` likewise.

        Returns:
            [num_tokens, num_heads, value_dim] in the dtype of the query.
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
        """Run layers one after another.

        Args:
            layers: of `Layer`.
            x: [num_tokens, hidden_size], contiguous, of the layers' kind: what enters the first one.
            out: [count, num_tokens, hidden_size], likewise: what each one leaves.
        """
        self._library.wingbeat_layers(
            ctypes.byref(layers[first]), count, ctypes.byref(batch), x.data_ptr(), out.data_ptr()
        )

    def tree_acceptance(
        self, committed_lens: Tensor, last_token_ids: Tensor, compacted: accept.Compacted | None = None
    ) -> accept.TreeAcceptance:
        """Walks trees and moves these numbers of slots, int64 [num_slots], to the ends of the paths."""
        return accept.TreeAcceptance(self._library, committed_lens, last_token_ids, compacted)

    def native_choice(self) -> NativeChoice:
        """Chooses tokens of rows of logits."""
        return NativeChoice(self._library)

    def draft_intake(self, present: Present, shape: Shape) -> DraftIntake:
        """Takes drafted trees in."""
        return DraftIntake(self._library, present, shape)

    def take_in(self, head: Head | BlockHead, sequences: Sequences, decided: Decided) -> None:
        """What a head keeps of decided pairs: keys and values, and an EAGLE head each sequence's last hidden state."""
        self._drafts[type(head)].take_in(*map(ctypes.byref, (head, sequences, decided)))

    def grow(self, head: Head | BlockHead, sequences: Sequences, roots: Roots) -> int:
        """A tree from each root; returns how many levels were grown."""
        return self._drafts[type(head)].grow(*map(ctypes.byref, (head, sequences, roots)))

    def answer(self, head: Head | BlockHead, sequences: Sequences, channel: Channel) -> bool:
        """Both, for a round of a channel, without block tables; False, and nothing done, where it does not fit."""
        return self._drafts[type(head)].answer(*map(ctypes.byref, (head, sequences, channel))) != 0


def _check_rows(x: Tensor, panels: Panels | GroupPanels) -> None:
    """Refuse rows past whose ends a product would read; raises ValueError."""
    if x.dtype != panels.dtype:
        raise ValueError(f"rows are {x.dtype} and weights {panels.dtype}: one dtype needed")
    if x.shape[-1] != panels.inputs:
        raise ValueError(f"rows have {x.shape[-1]} numbers and weights {panels.inputs} inputs: as many needed")


def pack_segments(segments: list[Any], dtype: torch.dtype) -> Segments | None:
    """Segments for the kernels, which read blocks where they lie; None without kernels, and on other devices.

    Args:
        segments: with the fields of `wingbeat.runtime.round.rows.Segment`; positions may be None, where a request's
            rows follow its context.
        dtype: of keys and values; None is returned for one that the kernels do not read.
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
    """`wingbeat.kernels.layer.reference.add_rms_norm` of rows without a residual."""
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
    """Rows of a forward pass; whoever holds it holds the tensors, and the addition.

    Args:
        cos: [num_tokens, dim], contiguous; `sin` likewise.
        slot_mapping: int64 [num_tokens], contiguous.
        addition: to products of the layers.
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
    """The kernels; None where there is no C++ compiler, and while somebody watches torch's operations.

    Who records them, as a graph does, would not see ours.
    """
    if not _used or torch._C._len_torch_dispatch_stack():
        return None
    return _opened()


def use_kernels(wanted: bool) -> bool:
    """Whether kernels are used from now on, whatever the environment says; returns whether they were."""
    global _used
    _used, before = wanted, _used
    return before


@cache
def _opened() -> CpuKernels | None:
    try:
        return CpuKernels(kept_in())
    except NoLibraryError as error:
        logger.warning("CPU kernels are left out, torch's operations run in their place: %s", error)
        return None
