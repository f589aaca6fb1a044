"""Mixtures of experts in few launches, without host synchronisation.

torch has a grouped product for bfloat16 on compute capability 9.0 and 10.0. On other GPUs torch copies the groups' end
indices to the host in every layer (pytorch issues 169970 and 186620), which prevents CUDA graph capture. Where torch
has the product, prompt chunks of more than `FEW_ROWS` rows use it.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from wingbeat.kernels.experts.product import FEW_ROWS, Gate, Routes, Shared, grouped_product, sum_choices
from wingbeat.runtime.experts.blocks import fuse_block
from wingbeat.runtime.experts.dense_blocks import fuse_dense_block
from wingbeat.runtime.experts.routers import fuse_router
from wingbeat.runtime.verifier.layers.linears import PackedParameters
from wingbeat.runtime.verifier.layers.trial import alike, drawn_rows

logger = logging.getLogger(__name__)
EXPERTS_NAME = "wingbeat"
GROUPED_CAPABILITIES = frozenset({(9, 0), (10, 0)})
"""Compute capabilities with torch's grouped kernel for bfloat16."""


def choose_experts(model: PreTrainedModel) -> None:
    """Makes a model on a GPU use `experts_forward` and the routers' kernel."""
    if model.device.type == "cuda":
        fuse_mixtures(model)


@torch.inference_mode()
def fuse_mixtures(model: PreTrainedModel) -> None:
    """Replaces known routers, and selects `experts_forward` if all experts have a supported form and in a trial it
    gives the numbers of transformers' own experts.
    """
    modules = list(model.modules())
    if num_dense := sum(fuse_dense_block(module) for module in modules):
        logger.info("%d mixtures compute their chosen experts alone", num_dense)
    own = [one for one in modules if hasattr(one, "is_concatenated") and hasattr(one, "_apply_gate")]
    if not own:
        return
    routers = sum(fuse_router(module) for module in modules)
    if all(_is_supported(one) for one in own):
        model.set_experts_implementation(EXPERTS_NAME)
        for module in modules:
            fuse_block(module, experts_forward)
        logger.info("%d mixtures of experts are fused, and %d of their routers", len(own), routers)
    else:
        logger.info("experts are left as they are: another form, or a trial gives other numbers")


def _is_supported(module: Any) -> bool:
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
        return False
    if isinstance(module, PackedParameters):  # the packed weights' own class computes the experts
        return True
    like = module.gate_up_proj if module.has_gate else module.up_proj
    module.__dict__["_gate"] = _gate_of(module, like) if module.has_gate else None
    rows = drawn_rows(like.shape[1 if module.is_transposed else 2], like)
    chosen = torch.arange(len(rows), device=like.device)[:, None] + torch.arange(2, device=like.device)
    given = (rows, chosen % module.num_experts, rows[:, :2].float().sigmoid().to(rows.dtype))
    return alike(experts_forward(module, *given), module(*given))


def _gate_of(module: Any, like: Tensor) -> Gate | None:
    """Returns the form of a module's gate; None if the kernel does not support the gate."""
    sample, plain = drawn_rows(64, like), Gate(not module.is_concatenated)
    of_module = plain._replace(
        alpha=getattr(module, "alpha", 1.0), limit=getattr(module, "limit", None) or plain.limit, shift=1.0
    )
    expected = module._apply_gate(sample)
    return next(
        (gate for gate in (plain, of_module) if alike(gate.apply(sample.float()).to(like.dtype), expected)), None
    )


def experts_forward(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    shared: tuple[Shared, Shared] | None = None,
) -> Tensor:
    """Computes the experts' output [num_rows, hidden] from rows [num_rows, hidden] and chosen experts [num_rows, k].

    The experts' outputs for a row are added in the order of the row's chosen experts, so that the sum does not depend
    on other rows.

    Args:
        shared: weights of shared experts before and behind the gate, if `top_k_index` has their ids.
    """
    own: Any = module
    if len(hidden_states) > FEW_ROWS and _has_grouped(hidden_states):
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
    gated, down = shared or (None, None)
    routes = Routes.of(top_k_index, own.num_experts + (gated.count if gated else 0))
    gate = vars(module).get("_gate")

    def product(rows: Tensor, name: str, shared: Shared | None, gate: Gate | None = None) -> Tensor:
        weight = getattr(own, f"{name}_proj")
        bias = getattr(own, f"{name}_proj_bias") if own.has_bias else None
        return grouped_product(rows, weight.mT if own.is_transposed else weight, bias, routes, gate, shared)

    made = product(hidden_states, "gate_up" if own.has_gate else "up", gated, gate)
    if gate is None:
        made = own._apply_gate(made) if own.has_gate else own.act_fn(made)
    return sum_choices(product(made, "down", down), top_k_weights)


def _has_grouped(rows: Tensor) -> bool:
    is_known = rows.is_cuda and rows.dtype == torch.bfloat16
    return is_known and torch.cuda.get_device_capability(rows.device) in GROUPED_CAPABILITIES


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)
