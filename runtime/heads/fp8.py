"""A draft head with weights of eight bits: drafting reads half of the bytes, and the verifier decides as ever."""

import torch
from torch import Tensor, nn

from wingbeat.kernels.grouped_weight import E4M3, GroupedWeight, Scales
from wingbeat.runtime.heads.layer import DecoderHead
from wingbeat.runtime.parts import first
from wingbeat.runtime.verifier.checkpoints.checkpoint import Place

LARGEST = 448.0
"""Of float8_e4m3fn."""


def to_fp8(weight: Tensor) -> GroupedWeight:
    """Round a weight [out_features, in_features], each channel's largest value to the largest there is."""
    wide = weight.detach().to(torch.float32)
    scales = (wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    values = (wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return GroupedWeight(E4M3, values.contiguous().view(torch.uint8), Scales(scales))


@torch.no_grad()
def use_fp8(head: DecoderHead) -> None:
    """Round the weights of a head's products, in its present dtype and on its device; embeddings and norms stay.

    On a GPU they lie as eight bits where a part multiplies by such weights. Elsewhere they are numbers as before.
    """
    place = Place(head.device, head.dtype)
    for linear in [module for module in head.modules() if isinstance(module, nn.Linear)]:
        weight = to_fp8(linear.weight)
        packs = place.device.type == "cuda"
        held = first("pack_weight", linear, weight, linear.bias, place) if packs else None
        if held is None:
            linear.weight.copy_(weight.dense())
            continue
        linear.weight = nn.Parameter(linear.weight.new_full((), float("nan")).expand(linear.weight.shape), False)
        first("keep_packed", linear, held)
