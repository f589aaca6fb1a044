"""Keys and values that a draft on the host attends to: the committed ones, gathered once, and the drafted behind."""

import torch
from torch import Tensor

from wingbeat.kernels.attention.reference import masked_attention
from wingbeat.runtime.drafters.growth import Level
from wingbeat.runtime.heads.contract import Attend


class Workspace:
    """`DraftedRows` of a host, whose attention is quickest over dense keys: the pool is read once and not written.

    Args:
        cache: keys and values of the pool.
        block_tables: int64 [num_reqs, num_blocks] that hold all contexts.
        num_context: int64 [num_reqs]: committed rows.
        num_levels: levels that are run.
        width: rows of a level.
    """

    def __init__(
        self, cache: tuple[Tensor, Tensor], block_tables: Tensor, num_context: Tensor, num_levels: int, width: int
    ) -> None:
        self.width = width
        num_reqs = len(num_context)
        # The context of one chain ends where its drafted pairs begin: nothing has to be masked.
        self.alone = num_reqs == 1 and width == 1
        self.num_context = int(num_context[0]) if self.alone else block_tables.shape[1] * cache[0].shape[1]
        num_keys = self.num_context + num_levels * width
        self.keys, self.values = (part.new_empty(num_reqs, num_keys, *part.shape[2:]) for part in cache)
        for tensor, part in zip((self.keys, self.values), cache, strict=True):
            tensor[:, : self.num_context] = part[block_tables].flatten(1, 2)[:, : self.num_context]
            # A masked key has weight zero, but zero times the NaN that fresh memory may hold is NaN.
            tensor[:, self.num_context :] = 0
        if self.alone:
            return
        self.hidden = torch.finfo(self.keys.dtype).min
        shown = torch.arange(num_keys, device=num_context.device) < num_context[:, None]
        mask = torch.where(shown, 0.0, self.hidden).to(self.keys.dtype)
        self.mask = mask[:, None].expand(-1, width, -1).clone()

    def attend(self, level: Level, scaling: float) -> Attend:
        """See `DraftedRows.attend`."""
        begin = self.num_context + (level.depth - 1) * self.width
        own = slice(begin, begin + self.width)
        if self.alone:
            return self._attend_alone(own, scaling)
        if level.visible is None:
            self.mask[:, :, own] = 0
        else:
            self.mask[:, :, self.num_context : own.stop] = torch.where(level.visible, 0.0, self.hidden)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.keys[:, own], self.values[:, own] = key, value
            return masked_attention(query, self.keys, self.values, self.mask, scaling)

        return attend

    def _attend_alone(self, own: slice, scaling: float) -> Attend:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.keys[:, own], self.values[:, own] = key, value
            return masked_attention(query, self.keys[:, : own.stop], self.values[:, : own.stop], None, scaling)

        return attend
