"""Quantises a draft head's linear weights to FP8, so that drafting reads half the bytes; verification is unaffected."""

import torch
from torch import Tensor, nn

from wingbeat.kernels.grouped_weight import E4M3, GroupedWeight, Scales
from wingbeat.runtime.heads.layer import DecoderHead
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.verifier.checkpoints.checkpoint import Place

LARGEST = 448.0
"""Largest finite value of float8_e4m3fn."""


def to_fp8(weight: Tensor) -> GroupedWeight:
    """Quantise a weight [out_features, in_features] per output channel; the largest magnitude of a channel maps to
    LARGEST.
    """
    wide = weight.detach().to(torch.float32)
    scales = (wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    values = (wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return GroupedWeight(E4M3, values.contiguous().view(torch.uint8), Scales(scales))


@torch.no_grad()
def use_fp8(head: DecoderHead) -> None:
    """Quantise the linear weights of a head in place; embeddings and norms are unchanged.

    On a GPU the weights stay in FP8 if an optional part supplies FP8 matrix products. Otherwise the weights are stored
    in the head's dtype, with their values rounded to FP8.
    """
    place = Place(head.device, head.dtype)
    for linear in [module for module in head.modules() if isinstance(module, nn.Linear)]:
        weight = to_fp8(linear.weight)
        packs = place.device.type == "cuda"
        held = first_result("pack_weight", linear, weight, linear.bias, place) if packs else None
        if held is None:
            linear.weight.copy_(weight.dense())
            continue
        linear.weight = nn.Parameter(linear.weight.new_full((), float("nan")).expand(linear.weight.shape), False)
        first_result("keep_packed", linear, held)
