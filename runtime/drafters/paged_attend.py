"""`PagedAttend`: stores a drafter's rows in one layer of its KV pool and computes their attention."""

from typing import NamedTuple

from torch import Tensor

from wingbeat.kernels.kv.reference import store_kv
from wingbeat.kernels.layer.reference import rotate_and_store
from wingbeat.runtime.heads.contract import Rotary
from wingbeat.runtime.round.rows import Segment
from wingbeat.runtime.verifier.layers.attention import attend_segments


class PagedAttend(NamedTuple):
    """An `Attend` over rows [..., heads, dim], with or without a batch dimension."""

    cache: tuple[Tensor, Tensor]
    """Key and value cache of the layer."""
    slot_mapping: Tensor
    """int64 [num_rows]: addresses at which the rows are stored."""
    segments: list[Segment]
    """Attention segments that together cover all rows."""
    scaling: float
    """Factor applied to query-key products."""
    window: int = 0
    """Sliding window in tokens; 0 means none."""
    sinks: Tensor | None = None
    """[num_heads]: attention sinks; None if the layer has none."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attend`."""
        store_kv(key.flatten(0, -3), value.flatten(0, -3), *self.cache, self.slot_mapping)
        return self.over(query.flatten(0, -3)).unflatten(0, query.shape[:-2])

    @property
    def in_fused_steps(self) -> bool:
        """Whether `fused` is available, which rotates and stores rows in one kernel on CUDA."""
        return self.cache[0].is_cuda

    def fused(self, qkv: Tensor, rotary: Rotary, norms: tuple = (), rows: Tensor | None = None) -> Tensor:
        """Rotate and store the rows of a fused QKV product, then attend.

        Args:
            qkv: [..., num_heads + 2 * num_kv_heads, dim].
            rotary: cosines and sines.
            norms: query norm, key norm and the epsilon of both norms, if heads are normalised; else empty.
            rows: int64 [n]: indices of the flattened rows whose queries are computed; None means all rows.

        Returns:
            [num_rows or n, num_heads, dim]
        """
        flat = qkv.reshape(-1, *qkv.shape[-2:])
        cos, sin = (factors.expand(*qkv.shape[:-2], 1, -1).reshape(len(flat), -1) for factors in rotary)
        query = rotate_and_store(flat, cos, sin, *self.cache, self.slot_mapping, *norms)
        return self.over(query if rows is None else query[rows])

    def over(self, query: Tensor) -> Tensor:
        """Compute attention of queries [num_rows, heads, dim] over the stored rows."""
        return attend_segments(
            query, *self.cache, self.segments, self.scaling, sliding_window=self.window, sinks=self.sinks
        )
