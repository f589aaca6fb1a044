"""Reads 8-bit and 4-bit weights with scales, from compressed-tensors, FP8 checkpoints and ModelOpt.

A weight has one of two forms: the tensor `weight` in int8 or float8, with scales in `weight_scale` or
`weight_scale_inv` (per tensor, row, part of a row, or square block); or the tensor `weight_packed`, in which each int32
holds several integers around zero, lowest bits first.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wingbeat.kernels.grouped_weight import E4M3, INT8, GroupedWeight, Scales
from wingbeat.runtime.quantised.packed_integers import in_groups, unpacked
from wingbeat.runtime.tensor_files import ModelCheckpointError

PARTS = ("weight_packed", "weight_scale", "weight_scale_inv", "weight_shape", "weight_zero_point", "weight_g_idx")


def block_of(settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Numbers of rows and columns that share a scale; None if `quantization_config` does not state them."""
    given = settings.get("weight_block_size") or next(iter(_stated(settings, "block_structure")), None)
    sizes = isinstance(given, list) and len(given) == 2 and all(isinstance(size, int) and size > 0 for size in given)
    return tuple(given) if sizes else None


def bits_of(settings: Mapping[str, Any]) -> Any:
    """Number of bits of a packed integer."""
    return settings.get("bits", settings.get("w_bit", next(iter(_stated(settings, "num_bits")), 4)))


def _stated(settings: Mapping[str, Any], name: str) -> list[Any]:
    groups = settings.get("config_groups")
    weights = (
        [one.get("weights") for one in groups.values() if isinstance(one, dict)] if isinstance(groups, dict) else []
    )
    return [one[name] for one in weights if isinstance(one, dict) and one.get(name) is not None]


def read_weight(layer: str, parts: Mapping[str, Tensor], settings: Mapping[str, Any]) -> GroupedWeight | Tensor:
    """A weight [out, in] from a layer's parts: a `GroupedWeight`, or a float32 tensor for formats without groups.

    Args:
        layer: name of the layer, for errors.
        parts: tensors of the layer by suffix.
        settings: `quantization_config`.

    Raises:
        ModelCheckpointError: the parts do not fit together; the message names the tensor.
    """
    scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
    if scale is None:
        raise ModelCheckpointError(f"missing tensor {layer}.weight_scale")
    if "weight_packed" in parts:
        return _packed(layer, parts, scale, bits_of(settings))
    weight, zeros = parts.get("weight"), parts.get("weight_zero_point")
    if weight is None:
        raise ModelCheckpointError(f"missing tensor {layer}.weight beside its scale")
    if zeros is not None and bool(zeros.any()):
        raise ModelCheckpointError(f"tensor {layer}.weight_zero_point: zero points of 8-bit weights are not supported")
    form = {torch.int8: INT8, torch.float8_e4m3fn: E4M3}.get(weight.dtype)
    if scale.ndim == 1 and len(scale) > 1:
        scale = scale[:, None]
    if form is None or weight.ndim != 2:
        return weight.float() * (scale.float() if scale.numel() == 1 else _spread(layer, scale.float(), weight.shape))
    return GroupedWeight(form, weight.contiguous().view(torch.uint8), Scales(_by_group(layer, scale, weight, settings)))


def _by_group(layer: str, scale: Tensor, weight: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Scales per tensor, row or block, expanded to [out, groups of inputs]."""
    if scale.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        scale = scale.float()
    outputs, inputs = weight.shape
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(outputs, 1)
    block = block_of(settings)
    rows, columns = _widths(layer, scale.shape, weight.shape, block)
    # The width of the last block may be partial, so the group size is the largest number that divides both the width of
    # a block and the number of inputs.
    group = math.gcd(columns, inputs)
    by_input = scale.repeat_interleave(columns // group, 1)[:, : inputs // group]
    return by_input.repeat_interleave(rows, 0)[:outputs]


def _widths(layer: str, scales: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, ...] | None) -> list[int]:
    """Numbers of rows and columns of a weight that share a scale.

    Args:
        layer: name of the layer, for errors.
        scales, shape: shapes of the scales and of the weight.
        block: see `block_of`; used in each dimension in which it is consistent with the number of scales.
    """
    problem = f"the scales {list(scales)} of {layer}.weight do not fit its {list(shape)}"
    if len(scales) != 2 or len(shape) != 2 or any(part > whole for part, whole in zip(scales, shape, strict=True)):
        raise ModelCheckpointError(problem)
    widths = []
    for dim, whole in enumerate(shape):
        width = -(-whole // scales[dim])
        # if the last block is partial, the width must be a power of two, as in the files of all known tools
        if whole % scales[dim]:
            width = 1 << (width - 1).bit_length()
        if block is not None and -(-whole // block[dim]) == scales[dim]:
            width = block[dim]
        if -(-whole // width) != scales[dim]:
            raise ModelCheckpointError(problem)
        widths.append(width)
    return widths


def _spread(layer: str, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Repeats scales [a, b] to the shape [out, in] of a weight."""
    for dim, width in enumerate(_widths(layer, scale.shape, shape, None)):
        scale = scale.repeat_interleave(width, dim).narrow(dim, 0, shape[dim])
    return scale


def _packed(layer: str, parts: Mapping[str, Tensor], scale: Tensor, num_bits: int) -> GroupedWeight:
    if num_bits not in (2, 4, 8):
        raise ModelCheckpointError(
            f"tensor {layer}.weight_packed has numbers of {num_bits!r} bits: 2, 4 and 8 are read"
        )
    packed, shape = parts["weight_packed"], parts.get("weight_shape")
    numbers = unpacked(packed, num_bits).flatten(1)
    if shape is not None:
        if packed.shape != (int(shape[0]), -(-int(shape[1]) * num_bits // 32)):
            raise ModelCheckpointError(
                f"tensor {layer}.weight_packed is {list(packed.shape)}, not {shape.tolist()} numbers of {num_bits} bits"
            )
        numbers = numbers[:, : int(shape[1])]
    scale = scale.reshape(1, 1) if scale.numel() == 1 else scale
    shape = list(numbers.shape)
    if scale.ndim != 2 or shape[1] % scale.shape[1] or scale.shape[0] not in (1, shape[0]):
        raise ModelCheckpointError(f"the scales {list(scale.shape)} of {layer}.weight do not fit its {shape}")
    scale = scale.expand(len(numbers), -1)
    zeros = parts.get("weight_zero_point")
    if zeros is None:
        middle = torch.full_like(scale, 2 ** (num_bits - 1), dtype=torch.uint8)
    else:  # zero points are packed along the rows, whereas weights are packed along the columns
        middle = unpacked(zeros.t(), num_bits).flatten(1).t()[: len(scale)]
        if middle.shape != scale.shape:
            raise ModelCheckpointError(f"tensor {layer}.weight_zero_point does not fit its scales {list(scale.shape)}")
    groups = parts.get("weight_g_idx")
    if groups is not None and (groups.shape != numbers.shape[1:] or groups.min() < 0 or groups.max() >= scale.shape[1]):
        raise ModelCheckpointError(f"tensor {layer}.weight_g_idx does not name one of {scale.shape[1]} groups")
    return in_groups(numbers.t(), middle.t(), scale.t(), groups, num_bits)
