"""A level of an EAGLE-3 head in fewer launches on a GPU: norms, rotation, silu and sums are parts of the products.

Each product of a level has two ways: the library's product between the steps of `wingbeat.kernels.layer.reference`, or
a few-rows kernel that contains these steps. When a head is loaded, levels are timed, and each product takes the faster
way.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.kernels import choice
from wingbeat.kernels.few_rows.embedded import embed_to_heads
from wingbeat.kernels.few_rows.product import MOST_ROWS
from wingbeat.kernels.layer.draft_rows import Pairs, Projection, Stored
from wingbeat.kernels.layer.reference import embed_beside, rotate_and_store
from wingbeat.runtime.drafters.paged_attend import PagedAttend
from wingbeat.runtime.fused.products import Product, choose_within
from wingbeat.runtime.heads.contract import Rotary
from wingbeat.runtime.heads.eagle3 import EagleHead

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_NEEDED = ("few_rows_product", "embed_to_heads", "add_rms_norm", "rotate_and_store")


class _NoAttention(PagedAttend):
    """Stores keys and values, and returns the queries."""

    def over(self, query: Tensor) -> Tensor:
        """See `PagedAttend.over`."""
        return query


class FusedLevel:
    """The products of a head's level; each uses the library until `choose` finds its kernel faster."""

    most_rows = MOST_ROWS
    """Maximum number of rows of a level."""

    def __init__(self, head: EagleHead) -> None:
        behind, norm = head.post_attention_layernorm, head.norm
        heads = head.qkv_proj
        num_heads = len(heads.weight) // head.head_dim
        self._counters = torch.zeros(num_heads, dtype=torch.int32, device=heads.weight.device)
        self._head_norms = () if head.q_norm is None else (head.q_norm.weight, head.k_norm.weight, head.q_norm.eps)
        self._norms, self._eps = (head.input_layernorm.weight, head.hidden_norm.weight), head.hidden_norm.eps
        self.products = {
            "qkv": Product(heads.weight.data, heads.bias),
            "o": Product(head.o_proj.weight.data, head.o_proj.bias, adds=True),
            "gate_up": Product(head.gate_up_proj.weight.data, None, gated=True, norm=(behind.weight, behind.eps)),
            "down": Product(head.down_proj.weight.data, None, adds=True),
            "logits": Product(head.lm_head.weight.data, None, norm=(norm.weight, norm.eps)),
        }
        for product in self.products.values():
            product.prepare()

    def run(self, pairs: Pairs, rotary: Rotary, attend: PagedAttend, *, normed: bool) -> Tensor:
        """Computes the output [num_rows, hidden_size] of the head's layer for at most `most_rows` rows.

        The features may be overwritten.

        Args:
            normed: whether the residual is the normalised features.
        """
        cos, sin = (factors.reshape(len(pairs.token_ids), -1) for factors in rotary)
        stored, qkv = Stored(cos, sin, *attend.cache, attend.slot_mapping), self.products["qkv"]
        if qkv.takes(len(pairs.token_ids)):
            weights = Projection(qkv.weight, qkv.bias, self._norms, self._eps, self._counters, self._head_norms)
            query, total = embed_to_heads(pairs, weights, stored, normed=normed)
        else:
            token_ids, table, features, parents = pairs
            inputs, total = embed_beside(token_ids, table, features, self._norms, self._eps, parents, normed)
            heads = functional.linear(inputs, qkv.weight, qkv.bias).unflatten(-1, (-1, cos.shape[-1]))
            query = rotate_and_store(heads, *stored, *self._head_norms)
        total = self.products["o"].faster(attend.over(query).flatten(-2), total)
        return self.products["down"].faster(self.products["gate_up"].faster(total), total)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes logits [num_rows, draft_vocab_size] after at most `most_rows` rows [num_rows, hidden_size]."""
        return self.products["logits"].faster(hidden)

    def choose(self, head: EagleHead) -> None:
        """Times levels without attention, and lets each product take the faster way for each number of rows."""
        choose_within(self.products, partial(self._sample, head))

    def _sample(self, head: EagleHead, num_rows: int) -> Callable[[], Tensor]:
        """Returns a function that computes a level, without attention, and its logits."""
        table, slots = head.embed_tokens.weight, torch.zeros(num_rows, dtype=torch.int64, device=head.device)
        features = table.new_zeros(num_rows, head.hidden_size).normal_()
        shape = (2, _BLOCK_SIZE, head.num_key_value_heads, head.head_dim)
        attend = _NoAttention((table.new_zeros(shape), table.new_zeros(shape)), slots + _BLOCK_SIZE, [], 1.0)
        pairs, rotary = Pairs(slots, table, features), head.rotary(slots)
        return lambda: self.logits(self.run(pairs, rotary, attend, normed=True))


def fuse_head(head: nn.Module) -> FusedLevel | None:
    """Returns the level of a head that runs on the kernels, or None; see `runtime.parts`."""
    if type(head) is not EagleHead or head.dtype is torch.float16:
        return None  # rows in float16 could overflow, because they are multiplied by a norm's weight first
    linears = (head.qkv_proj, head.o_proj, head.gate_up_proj, head.down_proj, head.lm_head)
    if any(type(linear) is not nn.Linear for linear in linears):
        return None
    if not all(choice.compiled(name, head.lm_head.weight) for name in _NEEDED):
        return None
    level = FusedLevel(head)
    try:
        level.choose(head)
    except Exception as error:  # compilers and drivers raise many kinds of exceptions
        logger.info("draft levels keep using the library: %s", (str(error).splitlines() or [""])[0])
        for product in level.products.values():
            product.own = (False,) * len(product.own)
    return level
