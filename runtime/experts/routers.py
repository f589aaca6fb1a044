"""Replaces known routers by a product and one launch, if a trial at load gives the same weights."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.kernels.experts.router import Rule, choose
from wingbeat.runtime.verifier.layers.linears import HALVES
from wingbeat.runtime.verifier.layers.trial import alike, drawn_rows

_SOFTMAX = {
    "gpt_oss": "GptOss",
    "granitemoe": "GraniteMoe",
    "granitemoehybrid": "GraniteMoeHybrid",
    "mixtral": "Mixtral",
    "olmoe": "Olmoe",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
}
ROUTERS = {
    f"transformers.models.{family}.modeling_{family}.{name}TopKRouter": False for family, name in _SOFTMAX.items()
} | {"transformers.models.glm4_moe.modeling_glm4_moe.Glm4MoeTopkRouter": True}
"""Class names of routers that choose the experts with the largest logits, and whether the scores are sigmoids of
float32 logits, with a bias for the choice. A softmax of the largest logits is a softmax of all, divided by its sum.
"""
_LEAST_SUM = 1e-20
"""Term that routers with sigmoids add to the sum of a row's weights."""


class FusedRouter(nn.Module):
    """First base class of a swapped router: replaces `forward` of the router's original class."""

    _rule: Rule

    def forward(
        self, hidden_states: Tensor, num_shared: int = 0, shared_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes logits, weights and chosen experts of rows [..., hidden_size].

        Args:
            num_shared: number of further choices, of parts of a shared expert.
            shared_logits: see `choose`.
        """
        if torch.compiler.is_compiling():
            return super().forward(hidden_states)
        own: Any = self
        logits = _logits(own, hidden_states.reshape(-1, own.weight.shape[1]), self._rule.sigmoid)
        bias, rule = getattr(own, "e_score_correction_bias", None), self._rule._replace(num_shared=num_shared)
        return logits, *choose(logits, bias, rule, shared_logits)


def _logits(own: Any, rows: Tensor, is_wide: bool) -> Tensor:
    if not is_wide:
        return functional.linear(rows, own.weight, getattr(own, "bias", None))
    if rows.is_cuda and rows.dtype == own.weight.dtype and rows.dtype in HALVES:
        return torch.mm(rows, own.weight.t(), out_dtype=torch.float32)
    return functional.linear(rows.float(), own.weight.float())


def fuse_router(module: nn.Module) -> bool:
    """Swaps a known router's class; returns whether the class was swapped."""
    own, kind = module, type(module)
    is_wide = ROUTERS.get(f"{kind.__module__}.{kind.__qualname__}")
    if is_wide is None or getattr(own, "num_group", 1) != getattr(own, "topk_group", 1):
        return False
    rows = drawn_rows(own.weight.shape[1], own.weight)
    logits, weights, chosen = module(rows)
    module.__dict__["_rule"] = Rule(
        own.top_k,
        is_wide,
        getattr(own, "norm_topk_prob", True),
        _LEAST_SUM if is_wide else 0.0,
        getattr(own, "routed_scaling_factor", 1.0),
        weights.dtype,
    )
    module.__class__ = _fused_router(kind)
    ours = module(rows)
    # Either of two experts with equal logits may be chosen.
    pairs = ((ours[0].gather(1, ours[2]), logits.gather(1, chosen)), (ours[1], weights))
    if all(alike(mine.sort(dim=-1).values, its.sort(dim=-1).values) for mine, its in pairs):
        return True
    module.__class__ = kind
    return False


@cache
def _fused_router(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (FusedRouter, kind), {})
