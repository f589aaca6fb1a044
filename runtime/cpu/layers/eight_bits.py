"""Weights of eight bits and fewer on CPUs, whose passes of few rows take as long as weights take to arrive.

Those of int8 are rounded in the model that transformers loaded, before anything is tried: the model that is served is
that one. What is multiplied by them, and sums, stay in the model's dtype; embeddings, norms and what is no linear layer
stay as they are.
"""

import logging

import torch
from torch import nn
from transformers import PreTrainedModel

from wingbeat.kernels.cpu.eight_bits import to_eight_bits
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.cpu.layers.packed_linears import pack_linear
from wingbeat.runtime.verifier_errors import UnsupportedModelError

logger = logging.getLogger(__name__)


@torch.no_grad()
def round_linears(model: PreTrainedModel, layers: nn.ModuleList) -> None:
    """Round the weights of the decoder's linear layers and of the output matrix, which an embedding that it is tied to
    does not share any longer.

    Raises:
        UnsupportedModelError: without the model's name: no kernels multiply by such weights here, or it has none.
    """
    if next(model.parameters()).device.type != "cpu" or cpu_kernels() is None:
        raise UnsupportedModelError("there are no kernels for such weights: a CPU and a C++ compiler are needed")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is nn.Linear and head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)
    # Experts that lie in one tensor, and layers of other classes, have code of their own that reads their weights.
    linears = {module for module in (*layers.modules(), head) if type(module) is nn.Linear}
    if not linears:
        raise UnsupportedModelError("it has no linear layers to round")
    for linear in linears:
        linear.weight.copy_(to_eight_bits(linear.weight).dense())
        linear.eight_bits = True
    numbers, total = sum(one.weight.numel() for one in linears), sum(one.numel() for one in model.parameters())
    logger.info("%d linear layers, %.0f%% of the numbers, are rounded to int8", len(linears), 100 * numbers / total)


def pack_rounded(model: PreTrainedModel) -> None:
    """Pack those that are not packed yet, such as those of layers that run by transformers' code."""
    for module in model.modules():
        if getattr(module, "eight_bits", False):
            pack_linear(module, cpu_kernels())
