"""Experts of mixtures on GPUs whose own grouped product waits for the host: ours, which can be captured.

torch's product of groups has a kernel for bfloat16 on compute capability 9.0 and 10.0. Everywhere else it copies the
groups' ends to the host (pytorch issues 169970 and 186620), in every layer.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from wingbeat.kernels.layer.experts import Routes, grouped_product

EXPERTS_NAME = "wingbeat"
GROUPED_CAPABILITIES = frozenset({(9, 0), (10, 0)})
"""Of GPUs with a kernel of torch's for groups of bfloat16."""


def choose_experts(model: PreTrainedModel) -> None:
    """Let a model's experts run by our product where torch's would wait, and they are of a form that ours knows."""
    device = model.device
    if device.type != "cuda" or not _known(model):
        return
    if model.dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) not in GROUPED_CAPABILITIES:
        model.set_experts_implementation(EXPERTS_NAME)


def _known(model: PreTrainedModel) -> bool:
    """Whether there are experts, all of which transformers dispatches and multiplies without more than that."""
    own = [one for one in model.modules() if hasattr(one, "is_concatenated") and hasattr(one, "_apply_gate")]
    return bool(own) and not any(
        getattr(one, "has_post_expert_norm", False) or getattr(one, "_is_expert_parallel", False) for one in own
    )


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """[num_rows, hidden], expert and weight of each of a row's choices [num_rows, k] -> [num_rows, hidden]

    A row's sum over its experts has their order, whatever is beside it.
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
