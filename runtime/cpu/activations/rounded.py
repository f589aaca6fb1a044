"""Rounds activations to int8 in blocks of 32 inputs, as llama.cpp does, because CPUs have instructions that sum four
int8 products at once.

Each row is rounded independently, so that a row's results still do not depend on the other rows of a pass.
"""

import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from wingbeat.kernels.cpu.eight_bits import to_eight_bits
from wingbeat.kernels.cpu.group_panels import GroupPanels, can_pack
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.kernels.cpu.panels import Panels
from wingbeat.kernels.grouped_weight import INT8, GroupedWeight, Scales
from wingbeat.runtime.cpu.layers.layer_stack import CpuLayer
from wingbeat.runtime.cpu.layers.packed_modules import PackedExperts
from wingbeat.runtime.verifier.layers.model_part import ModelPart
from wingbeat.runtime.verifier_errors import UnsupportedModelError

if TYPE_CHECKING:
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

logger = logging.getLogger(__name__)


class RoundedActivations(ModelPart):
    """Rounds the inputs of a model's packed linear layers.

    Raises:
        UnsupportedModelError: no linear layer has packed integer weights.
    """

    name = "rounded activations"
    computed_by = ", activations rounded to int8"

    def __init__(self, loaded: "LoadedModel") -> None:
        linears = [one for one in loaded.model.modules() if isinstance(one, nn.Linear)]
        experts = [one.panels for one in loaded.model.modules() if isinstance(one, PackedExperts) and one.panels]
        count = sum(map(_round_rows, linears))
        of_experts = sum(panels.round_rows() for each in experts for panels in each.all)
        if not count + of_experts:
            dtype = str(loaded.dtype).removeprefix("torch.")
            raise UnsupportedModelError(
                f"{loaded.name}: cpu_activations is int8, dtype is {dtype}, and none "
                "of its linear layers has packed weights of whole numbers; use exact, or dtype float32 with a model of "
                "four to eight bits, or dtype int8"
            )
        for layer, attention in zip(loaded.decoder_layers, loaded.layers, strict=True):
            if isinstance(layer, CpuLayer) and layer.stack is not None:
                layer.stack.add(layer, attention)
        beside = f" and {of_experts} of experts" if of_experts else ""
        logger.info("%d of %d linear layers%s round their inputs to int8", count, len(linears), beside)


def _round_rows(linear: nn.Linear) -> bool:
    """Makes a linear layer round its inputs. Returns False if the kernels cannot multiply rounded inputs by the layer's
    weights.
    """
    panels = getattr(linear, "panels", None)
    if isinstance(panels, Panels) and panels.scales is not None:
        values, scales = to_eight_bits(panels.dense())
        weight = GroupedWeight(INT8, values.view(torch.uint8), Scales(scales[:, None]))
        if can_pack(weight):
            linear.panels = panels = cpu_kernels().pack_groups(weight, panels.bias)
    return isinstance(panels, GroupPanels) and panels.round_rows()
