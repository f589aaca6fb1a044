"""Computes a mixture's shared expert as further experts of the mixture, which all rows have."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.kernels.experts.product import FEW_ROWS, Gate, Shared
from wingbeat.runtime.experts.routers import FusedRouter
from wingbeat.runtime.verifier.layers.same_code import known_as
from wingbeat.runtime.verifier.layers.trial import alike, drawn_rows

_BLOCKS = {
    "ernie4_5_moe": "Ernie4_5_MoeSparseMoeBlock",
    "glm4_moe": "Glm4MoeMoE",
    "hunyuan_v1_moe": "HunYuanMoEV1Moe",
    "hy_v3": "HYV3MoE",
    "qwen2_moe": "Qwen2MoeSparseMoeBlock",
}
BLOCKS = frozenset(f"transformers.models.{family}.modeling_{family}.{name}" for family, name in _BLOCKS.items())
"""Class names of blocks that add a shared expert to the experts, weighted by the sigmoid of a linear layer or by 1;
blocks of other families have the code of one of these.
"""
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")


class FusedBlock(nn.Module):
    """First base class of a swapped block: replaces `forward` of the block's original class."""

    _forward: Callable[..., Tensor]
    """`experts_forward`."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Computes [1, num_rows, hidden_size] of the same shape.

        Prompt chunks, and linear layers with hooks or of other classes, such as those with adapters, run transformers'
        code.
        """
        own: Any = self
        linears, of_shared = _linears(own)
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        if len(rows) > FEW_ROWS or torch.compiler.is_compiling() or not all(map(_is_plain, linears)):
            return super().forward(hidden_states)
        gate, up, down = (one.weight for one in linears[:3])
        count = len(gate) // own.experts.down_proj.shape[2]
        logits = None if of_shared is None else functional.linear(rows, of_shared.weight)
        bias = getattr(own, "e_score_correction_bias", None)
        _, weights, chosen = own.gate(rows, bias, num_shared=count, shared_logits=logits)
        shared = Shared(count, (gate, up)), Shared(count, (down,))
        return self._forward(own.experts, rows, chosen, weights, shared).view(hidden_states.shape)


def _linears(block: Any) -> tuple[list[nn.Linear], nn.Linear | None]:
    """Returns the linear layers of a block's shared expert: gate, up, down and, if there is one, that of its weight."""
    mlp = shared_of(block)
    of_weight = getattr(block, "shared_expert_gate", None)
    return [mlp.gate_proj, mlp.up_proj, mlp.down_proj, *([] if of_weight is None else [of_weight])], of_weight


def shared_of(block: Any) -> Any:
    """Returns the module of a block's shared expert, or None."""
    return next((getattr(block, name) for name in _SHARED if hasattr(block, name)), None)


def _is_plain(linear: nn.Linear) -> bool:
    has_hooks = linear._forward_pre_hooks or linear._forward_hooks
    return type(linear) is nn.Linear and linear.bias is None and not has_hooks


def fuse_block(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Swaps the class of a block with a shared expert, if a trial gives the same numbers."""
    own, kind = module, type(module)
    if known_as(kind, BLOCKS) is None or not isinstance(own.gate, FusedRouter) or shared_of(own) is None:
        return
    linears, _ = _linears(own)
    sizes, gate = own.experts.down_proj.shape, vars(own.experts).get("_gate")
    if not all(map(_is_plain, linears)) or len(linears[0].weight) % sizes[2] or gate != Gate():
        return
    rows = drawn_rows(sizes[1], own.experts.down_proj)[None]
    expected = module(rows)
    module.__class__ = _fused_block(kind)
    module.__dict__["_forward"] = forward
    if not alike(module(rows), expected):
        module.__class__ = kind


@cache
def _fused_block(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (FusedBlock, kind), {})
