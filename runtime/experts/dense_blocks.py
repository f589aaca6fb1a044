"""Computes only the chosen experts of mixtures for which transformers' code computes all experts for all rows."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.kernels.experts.product import Gate, Routes, grouped_product, sum_choices
from wingbeat.kernels.experts.router import Rule, choose
from wingbeat.runtime.verifier.layers.linears import PackedParameters
from wingbeat.runtime.verifier.layers.same_code import known_as
from wingbeat.runtime.verifier.layers.trial import alike, drawn_rows

BLOCKS = frozenset({"transformers.models.llama4.modeling_llama4.Llama4TextMoe"})
"""Class names of blocks that weight the rows before the experts, by the sigmoid of the router's logits, and add a
shared expert.
"""


class ChosenExperts(nn.Module):
    """First base class of a swapped block: replaces `forward` of the block's original class."""

    _router_kind: type[nn.Module]

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Computes [.., hidden_size] -> [num_rows, hidden_size], and the router's logits [num_rows, num_experts]."""
        own: Any = self
        router, experts = own.router, own.experts
        if type(router) is not self._router_kind or torch.compiler.is_compiling():  # a router may have an adapter
            return super().forward(hidden_states)
        rows = hidden_states.reshape(-1, own.hidden_dim)
        logits = functional.linear(rows, router.weight)
        weights, chosen = choose(logits, None, Rule(own.top_k, sigmoid=True, normalised=False, dtype=rows.dtype))
        routes = Routes.of(chosen, own.num_experts)
        weighted = (rows[:, None] * weights[:, :, None]).flatten(0, 1)
        made = grouped_product(weighted, experts.gate_up_proj.mT, None, routes, Gate())
        each = grouped_product(made, experts.down_proj.mT, None, routes)
        total = each if own.top_k == 1 else sum_choices(each, torch.ones_like(weights))
        return own.shared_expert(rows).add_(total), logits


def fuse_dense_block(module: nn.Module) -> bool:
    """Swaps a known block's class, if a trial gives the same numbers; returns whether the class was swapped."""
    own, kind = module, type(module)
    if known_as(kind, BLOCKS) is None or isinstance(own.experts, PackedParameters):
        return False
    rows = drawn_rows(own.hidden_dim, own.router.weight)
    expected = module(rows)
    module.__dict__["_router_kind"] = type(own.router)
    module.__class__ = _chosen_experts(kind)
    if all(alike(ours, theirs) for ours, theirs in zip(module(rows), expected, strict=True)):
        return True
    module.__class__ = kind
    return False


@cache
def _chosen_experts(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (ChosenExperts, kind), {})
