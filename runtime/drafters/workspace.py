"""Keys and values that a draft on the host attends to: the committed ones, gathered once, and the drafted behind."""

import torch
from torch import Tensor

from wingbeat.kernels.attention.reference import masked_attention
from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.heads.contract import Attend


class Workspace:
    """Keys and values of one propose: the committed context, gathered once, and behind it the drafted pairs."""

    def __init__(
        self, cache: tuple[Tensor, Tensor], batch: DraftBatch, lens: Tensor, block_size: int, top_k: int, levels: int
    ) -> None:
        self.top_k = top_k
        num_blocks = max(-(-(batch.max_committed_len - 1) // block_size), 1)
        tables = batch.block_tables[batch.proposal_slots, :num_blocks]
        # The context of one chain ends where its drafted pairs begin: nothing has to be masked.
        self.alone = len(lens) == 1 and top_k == 1
        self.num_context = int(lens[0]) - 1 if self.alone else num_blocks * block_size
        num_reqs, num_keys = len(lens), self.num_context + levels * top_k
        self.keys, self.values = (part.new_empty(num_reqs, num_keys, *part.shape[2:]) for part in cache)
        for tensor, part in zip((self.keys, self.values), cache, strict=True):
            tensor[:, : self.num_context] = part[tables].flatten(1, 2)[:, : self.num_context]
            # A masked key has weight zero, but zero times the NaN that fresh memory may hold is NaN.
            tensor[:, self.num_context :] = 0
        if self.alone:
            return
        self.hidden = torch.finfo(self.keys.dtype).min
        shown = torch.arange(num_keys, device=lens.device) < (lens - 1)[:, None]
        mask = torch.where(shown, 0.0, self.hidden).to(self.keys.dtype)
        self.mask = mask[:, None].expand(-1, top_k, -1).clone()

    def attend(self, level: int, visible: Tensor | None, scaling: float) -> Attend:
        """The `attend` of one level.

        Args:
            visible: bool [num_reqs, top_k, (level + 1) * top_k], drafted pairs each node sees beside the context; None
                adds the level's own pairs to what the level before saw.
        """
        begin = self.num_context + level * self.top_k
        own = slice(begin, begin + self.top_k)
        if self.alone:
            return self._attend_alone(own, scaling)
        if visible is None:
            self.mask[:, :, own] = 0
        else:
            self.mask[:, :, self.num_context : own.stop] = torch.where(visible, 0.0, self.hidden)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.keys[:, own], self.values[:, own] = key, value
            return masked_attention(query, self.keys, self.values, self.mask, scaling)

        return attend

    def _attend_alone(self, own: slice, scaling: float) -> Attend:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.keys[:, own], self.values[:, own] = key, value
            return masked_attention(query, self.keys[:, : own.stop], self.values[:, : own.stop], None, scaling)

        return attend
