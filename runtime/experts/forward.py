"""Mixture-of-experts matrix products without host synchronisation, for GPUs where torch's grouped product synchronises.

torch has a grouped kernel for bfloat16 on compute capability 9.0 and 10.0. On other GPUs torch copies the groups' end
indices to the host in every layer (pytorch issues 169970 and 186620), which prevents CUDA graph capture.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from wingbeat.kernels.experts.product import Routes, grouped_product

EXPERTS_NAME = "wingbeat"
GROUPED_CAPABILITIES = frozenset({(9, 0), (10, 0)})
"""Compute capabilities with torch's grouped kernel for bfloat16."""


def choose_experts(model: PreTrainedModel) -> None:
    """Selects `experts_forward` if torch's product would synchronise and the experts have a supported form."""
    device = model.device
    if device.type != "cuda" or not _known(model):
        return
    if model.dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) not in GROUPED_CAPABILITIES:
        model.set_experts_implementation(EXPERTS_NAME)


def _known(model: PreTrainedModel) -> bool:
    """Whether the model has experts for which transformers only dispatches rows and multiplies them by weights."""
    own = [one for one in model.modules() if hasattr(one, "is_concatenated") and hasattr(one, "_apply_gate")]
    return bool(own) and not any(
        getattr(one, "has_post_expert_norm", False) or getattr(one, "_is_expert_parallel", False) for one in own
    )


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes the experts' output [num_rows, hidden] from rows [num_rows, hidden] and chosen experts [num_rows, k].

    The experts' outputs for a row are added in the order of the row's chosen experts, so that the sum does not depend
    on other rows.
    """
    own: Any = module
    routes = Routes.of(top_k_index, own.num_experts)

    def product(rows: Tensor, name: str) -> Tensor:
        weight = getattr(own, f"{name}_proj")
        bias = getattr(own, f"{name}_proj_bias") if own.has_bias else None
        return grouped_product(rows, weight.mT if own.is_transposed else weight, bias, routes)

    if own.has_gate:
        made = own._apply_gate(product(hidden_states, "gate_up"))
    else:
        made = own.act_fn(product(hidden_states, "up"))
    each = product(made, "down").view(*top_k_index.shape, -1)
    return (each.float() * top_k_weights[:, :, None]).sum(dim=1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)
