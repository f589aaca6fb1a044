"""Weights of eight and fewer bits on CPUs. Smaller weights make passes with few rows faster, because reading the
weights limits their speed.

For int8, the weights are rounded in the model that transformers loaded, before that model is tested, so that the tested
and the served model are the same. Activations and sums stay in the model's dtype; embeddings, norms and other modules
than linear layers stay as they are.
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
    """Rounds the weights of the decoder's linear layers and of the output head to int8.

    An output head that is tied to the embedding gets its own copy of the weight, so that the embedding is not rounded.

    Raises:
        UnsupportedModelError: there are no kernels, or the model has no linear layers; the message does not contain the
            model's name.
    """
    if next(model.parameters()).device.type != "cpu" or cpu_kernels() is None:
        raise UnsupportedModelError("there are no kernels for such weights: a CPU and a C++ compiler are needed")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is nn.Linear and head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)
    # Only plain linear layers are rounded, because only these can be packed later. Experts that are stored in one
    # tensor, and layers of other classes, read their weights with code of their own.
    linears = {module for module in (*layers.modules(), head) if type(module) is nn.Linear}
    if not linears:
        raise UnsupportedModelError("it has no linear layers to round")
    for linear in linears:
        linear.weight.copy_(to_eight_bits(linear.weight).dense())
        linear.eight_bits = True
    numbers, total = sum(one.weight.numel() for one in linears), sum(one.numel() for one in model.parameters())
    logger.info("%d linear layers, %.0f%% of the numbers, are rounded to int8", len(linears), 100 * numbers / total)


def pack_rounded(model: PreTrainedModel) -> None:
    """Packs all rounded layers that are not packed yet, such as the linear layers of decoder layers that run
    transformers' code.
    """
    for module in model.modules():
        if getattr(module, "eight_bits", False):
            pack_linear(module, cpu_kernels())
