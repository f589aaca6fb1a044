"""Storage and attention of a drafter's rows in one layer of its pool."""

from torch import Tensor

from wingbeat.kernels.kv.reference import store_kv
from wingbeat.runtime.round.rows import Segment
from wingbeat.runtime.verifier.layers.attention import attend_segments


class PagedAttend:
    """An `Attend` over rows [..., heads, dim], side by side or flat.

    Args:
        cache: the layer's keys and values in the pool.
        slot_mapping: int64 [num_rows]: where the rows are stored.
        segments: of all rows.
        scaling: of the products of queries and keys.
        window: 0 stands for none.
        sinks: [num_heads], where the layer has them.
    """

    def __init__(
        self,
        cache: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        segments: list[Segment],
        scaling: float,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> None:
        self.cache, self.slot_mapping, self.segments = cache, slot_mapping, segments
        self.scaling, self.window, self.sinks = scaling, window, sinks

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attend`."""
        store_kv(key.flatten(0, -3), value.flatten(0, -3), *self.cache, self.slot_mapping)
        return self.over(query.flatten(0, -3)).unflatten(0, query.shape[:-2])

    @property
    def in_fused_steps(self) -> bool:
        """Whether a layer rotates and stores by itself, and asks for attention alone."""
        return self.cache[0].is_cuda

    def over(self, query: Tensor) -> Tensor:
        """Attention of queries [num_rows, heads, dim] over what is stored."""
        return attend_segments(
            query, *self.cache, self.segments, self.scaling, sliding_window=self.window, sinks=self.sinks
        )
