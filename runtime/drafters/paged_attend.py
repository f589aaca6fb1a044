"""Storage and attention of a drafter's rows in one layer of its pool."""

from typing import NamedTuple

from torch import Tensor

from wingbeat.kernels.kv.reference import store_kv
from wingbeat.kernels.layer.reference import rotate_and_store
from wingbeat.runtime.heads.contract import Rotary
from wingbeat.runtime.round.rows import Segment
from wingbeat.runtime.verifier.layers.attention import attend_segments


class PagedAttend(NamedTuple):
    """An `Attend` over rows [..., heads, dim], side by side or flat."""

    cache: tuple[Tensor, Tensor]
    """The layer's keys and values in the pool."""
    slot_mapping: Tensor
    """int64 [num_rows]: where the rows are stored."""
    segments: list[Segment]
    """Segments of all rows."""
    scaling: float
    """Factor of the products of queries and keys."""
    window: int = 0
    """0 stands for none."""
    sinks: Tensor | None = None
    """[num_heads], where the layer has them."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attend`."""
        store_kv(key.flatten(0, -3), value.flatten(0, -3), *self.cache, self.slot_mapping)
        return self.over(query.flatten(0, -3)).unflatten(0, query.shape[:-2])

    @property
    def in_fused_steps(self) -> bool:
        """Whether a layer rotates and stores by itself, and asks for attention alone."""
        return self.cache[0].is_cuda

    def fused(self, qkv: Tensor, rotary: Rotary, norms: tuple = (), rows: Tensor | None = None) -> Tensor:
        """Attention of products of inputs side by side, which are rotated and stored on the way.

        Args:
            qkv: [..., num_heads + 2 * num_kv_heads, dim].
            norms: of queries and of keys, and their epsilon, where they are normed by head.
            rows: int64 [n]: those of the flattened inputs whose queries are wanted; None stands for all.

        Returns:
            [num_rows or n, num_heads, dim]
        """
        flat = qkv.reshape(-1, *qkv.shape[-2:])
        cos, sin = (factors.expand(*qkv.shape[:-2], 1, -1).reshape(len(flat), -1) for factors in rotary)
        query = rotate_and_store(flat, cos, sin, *self.cache, self.slot_mapping, *norms)
        return self.over(query if rows is None else query[rows])

    def over(self, query: Tensor) -> Tensor:
        """Attention of queries [num_rows, heads, dim] over what is stored."""
        return attend_segments(
            query, *self.cache, self.segments, self.scaling, sliding_window=self.window, sinks=self.sinks
        )
