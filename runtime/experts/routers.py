"""Replaces known routers by a product and one launch, if a trial at load gives the same weights."""

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.kernels.experts.router import Rule, choose
from wingbeat.runtime.verifier.layers.linears import HALVES
from wingbeat.runtime.verifier.layers.same_code import known_as
from wingbeat.runtime.verifier.layers.trial import alike, drawn_rows


class Known(NamedTuple):
    """Rule by which the code of a known router chooses; the router's own attributes say the rest."""

    is_wide: bool = False
    """Whether logits are computed in float32."""
    sigmoid: bool = False
    normalised: bool = True
    least: float = 0.0
    group_best: int = 1


_KNOWN = {
    "deepseek_v2.DeepseekV2TopkRouter": Known(True, normalised=False),
    "ernie4_5_moe.Ernie4_5_MoeTopKRouter": Known(True),
    "glm4_moe.Glm4MoeTopkRouter": Known(True, True, least=1e-20, group_best=2),
    "gpt_oss.GptOssTopKRouter": Known(),
    "granitemoe.GraniteMoeTopKRouter": Known(),
    "hunyuan_v1_moe.HunYuanMoEV1Gate": Known(),
    "hy_v3.HYV3TopKRouter": Known(True, True, least=1e-20),
    "jamba.JambaTopKRouter": Known(normalised=False),
    "minimax_m2.MiniMaxM2TopKRouter": Known(sigmoid=True),
    "mixtral.MixtralTopKRouter": Known(),
    "qwen2_moe.Qwen2MoeTopKRouter": Known(),
    "qwen3_5_moe.Qwen3_5MoeTopKRouter": Known(),
}
ROUTERS = {"transformers.models.{0}.modeling_{0}.{1}".format(*name.split(".")): known for name, known in _KNOWN.items()}
"""Routers by class name; classes of other families have the code of one of these. A softmax of the largest logits is a
softmax of all, divided by its sum.
"""
_SCALES = ("routed_scaling_factor", "router_scaling_factor")


class FusedRouter(nn.Module):
    """First base class of a swapped router: replaces `forward` of the router's original class."""

    _rule: Rule
    _is_wide: bool

    def forward(
        self,
        hidden_states: Tensor,
        bias: Tensor | None = None,
        *,
        num_shared: int = 0,
        shared_logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes logits, weights and chosen experts of rows [..., hidden_size].

        Args:
            bias: [num_experts], added to the scores for the choice alone, if the router does not hold it.
            num_shared: number of further choices, of parts of a shared expert.
            shared_logits: see `choose`.
        """
        if torch.compiler.is_compiling():
            return super().forward(hidden_states, *(() if bias is None else (bias,)))
        weight, added = _weights(self)
        logits = _logits(hidden_states.reshape(-1, weight.shape[1]), weight, added, self._is_wide)
        bias = _bias_of(self) if bias is None else bias
        return logits, *choose(logits, bias, self._rule._replace(num_shared=num_shared), shared_logits)


def _weights(router: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the weight and the bias of a router's product."""
    held = getattr(router, "wg", router)
    return held.weight, getattr(held, "bias", None)


def _bias_of(router: Any) -> Tensor | None:
    """Returns the term [num_experts] that a router holds for the choice alone."""
    bias = getattr(getattr(router, "moe_statics", router), "e_score_correction_bias", None)
    return None if bias is None else bias.view(-1)


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, is_wide: bool) -> Tensor:
    if not is_wide and rows.dtype == weight.dtype:
        return functional.linear(rows, weight, bias)
    if rows.is_cuda and rows.dtype == weight.dtype and rows.dtype in HALVES and bias is None:
        return torch.mm(rows, weight.t(), out_dtype=torch.float32)
    return functional.linear(rows.float(), weight.float(), None if bias is None else bias.float())


def fuse_router(module: nn.Module) -> bool:
    """Swaps a known router's class; returns whether the class was swapped."""
    own, kind = module, type(module)
    name = known_as(kind, ROUTERS)
    if name is None or getattr(getattr(own, "wg", None), "packed", None) is not None:
        return False
    known, (weight, _) = ROUTERS[name], _weights(own)
    rows, given = drawn_rows(weight.shape[1], weight), []
    if len(inspect.signature(kind.forward).parameters) > 2:
        given = [drawn_rows(len(weight), weight)[0].float()]
    logits, weights, chosen = module(rows, *given)
    num_groups = getattr(own, "num_group", None) or 1
    module.__dict__["_is_wide"], module.__dict__["_rule"] = (
        known.is_wide,
        Rule(
            own.top_k,
            known.sigmoid,
            getattr(own, "norm_topk_prob", known.normalised),
            known.least,
            next((getattr(own, each) for each in _SCALES if hasattr(own, each)), 1.0),
            weights.dtype,
            num_groups=num_groups,
            kept_groups=(getattr(own, "topk_group", None) or 1) if num_groups > 1 else 1,
            group_best=known.group_best,
        ),
    )
    module.__class__ = _fused_router(kind)
    ours = module(rows, *given)
    # Either of two experts with equal logits may be chosen.
    pairs = ((ours[0].gather(1, ours[2]), logits.gather(1, chosen)), (ours[1], weights))
    if all(alike(mine.sort(dim=-1).values, its.sort(dim=-1).values) for mine, its in pairs):
        return True
    module.__class__ = kind
    return False


@cache
def _fused_router(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (FusedRouter, kind), {})
