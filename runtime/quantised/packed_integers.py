"""Unpacks linear weights of GPTQ and AWQ: several small integers per int32, lowest bits first.

    weight[out, in] = (quantised[in, out] - zero[group of in, out]) * scale[group of in, out]

Formats at four bits: in GPTQ an int32 holds eight inputs of one output, in AWQ eight outputs of one input. AWQ stores
the outputs in an order of its own (`_AWQ_ORDER`). Older GPTQ files store each zero point minus one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wingbeat.kernels.grouped_weight import INT8, UINT4, GroupedWeight, Scales
from wingbeat.runtime.tensor_files import ModelCheckpointError

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions inside the int32, from the first output to the eighth."""
PARTS = ("qweight", "qzeros", "scales", "g_idx")


def unpack_linears(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """A checkpoint's tensors, with packed layers replaced by a float32 `weight` [out, in].

    Args:
        tensors: tensors by name.
        settings: `quantization_config`.

    Raises:
        ModelCheckpointError: the packing is not supported; the message names the field and its value.
    """
    check_packing(settings)
    layers, plain = parts_of_layers(tensors)
    dense = {f"{layer}.weight": read_linear(layer, parts, settings).dense() for layer, parts in layers.items()}
    return {name: tensors[name] for name in plain} | dense


def parts_of_layers(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Tensors of packed layers, by layer and part, and the names of all other tensors."""
    layers: dict[str, dict[str, Tensor]] = {}
    plain = []
    for name in tensors:
        layer, _, part = name.rpartition(".")
        if part in PARTS:
            layers.setdefault(layer, {})[part] = tensors[name]
        else:
            plain.append(name)
    return layers, plain


def check_packing(settings: Mapping[str, Any]) -> None:
    """Raise an error for a packing that is not supported.

    Raises:
        ModelCheckpointError: the packing is not supported; the message names the field of `quantization_config` and its
            value.
    """
    method, num_bits = settings["quant_method"], _bits(settings)
    widths, layouts = ((4,), ("gemm",)) if method == "awq" else ((2, 4, 8), ("gptq", "gptq_v2"))
    field = "version" if method == "awq" else "checkpoint_format"
    layout = str(settings.get(field, layouts[0])).lower()
    for name, value, known in (("bits", num_bits, widths), (field, layout, layouts)):
        if value not in known:
            raise ModelCheckpointError(
                f"quantization_config: {name} is {value!r}; of {method}, {', '.join(map(str, known))} can be read"
            )


def read_linear(layer: str, parts: Mapping[str, Tensor], settings: Mapping[str, Any]) -> GroupedWeight:
    """A linear layer's weight from its packed parts.

    Raises:
        ModelCheckpointError: the parts do not fit together; the message names the layer.
    """
    is_awq, num_bits = settings["quant_method"] == "awq", _bits(settings)
    _check(layer, parts, num_bits, by_input=is_awq)
    if is_awq:
        numbers, zeros = (unpacked(parts[name], 4, _AWQ_ORDER).flatten(1) for name in ("qweight", "qzeros"))
        groups = None
    else:
        numbers = unpacked(parts["qweight"], num_bits).transpose(1, 2).flatten(0, 1)  # [in, out]
        older = str(settings.get("checkpoint_format", "gptq")).lower() == "gptq"
        zeros = unpacked(parts["qzeros"], num_bits).flatten(1).short() + int(older)
        groups = parts.get("g_idx")
    return in_groups(numbers, zeros, parts["scales"], groups, num_bits)


def _bits(settings: Mapping[str, Any]) -> Any:
    return settings.get("bits", settings.get("w_bit"))


def _check(layer: str, parts: Mapping[str, Tensor], num_bits: int, by_input: bool) -> None:
    """Checks that the shapes of one layer's parts fit together."""
    absent = [part for part in PARTS[:3] if part not in parts]
    if absent:
        raise ModelCheckpointError(f"tensor {layer}.{absent[0]} is missing beside {layer}.{next(iter(parts))}")
    packed, (num_groups, outputs) = parts["qweight"], parts["scales"].shape
    each = 32 // num_bits
    rows, columns = packed.shape
    inputs, wanted = (rows, outputs // each) if by_input else (rows * each, outputs)
    if columns != wanted or parts["qzeros"].shape != (num_groups, outputs // each) or inputs % num_groups:
        shapes = ", ".join(f"{name} {list(parts[name].shape)}" for name in PARTS[:3])
        raise ModelCheckpointError(f"the tensors of {layer} do not fit together: {shapes}")
    groups = parts.get("g_idx")
    if groups is not None and (groups.shape != (inputs,) or groups.min() < 0 or groups.max() >= num_groups):
        raise ModelCheckpointError(f"tensor {layer}.g_idx does not name one of {num_groups} groups for {inputs} inputs")


def unpacked(packed: Tensor, num_bits: int, order: Sequence[int] | None = None) -> Tensor:
    """int32 [a, b] -> uint8 [a, b, integers per int32].

    Args:
        packed: the packed integers.
        num_bits: bits per integer.
        order: position of each integer inside the int32; None means that the first integer is in the lowest bits.
    """
    found = packed.new_empty(*packed.shape, 32 // num_bits, dtype=torch.uint8)
    for index, place in enumerate(order or range(32 // num_bits)):
        found[..., index] = packed >> place * num_bits & 2**num_bits - 1
    return found


def in_groups(numbers: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None, num_bits: int) -> GroupedWeight:
    """A weight from integers uint8 [in, out], with zeros and scales [groups, out].

    Args:
        numbers, zeros, scales: integers of the weight; zero point and scale of each group.
        groups: int [in]: group of each input; None if the inputs are grouped in order.
        num_bits: bits per integer.
    """
    order = None
    if groups is not None:
        each = groups.bincount(minlength=len(scales))
        if bool((groups.diff() < 0).any()):
            order = groups.sort(stable=True).indices
            numbers = numbers[order]
        # if the groups have unequal sizes, each input becomes a group of its own
        if int(each.min()) != int(each.max()):
            expanded = torch.arange(len(scales)).repeat_interleave(each)
            zeros, scales = zeros[expanded], scales[expanded]
    rows = numbers.t()
    if num_bits <= 4:
        return GroupedWeight(UINT4, rows, Scales(scales.t()), zeros=zeros.t().byte(), order=order)
    # float16 represents the integers -127 to 128 exactly.
    return GroupedWeight(INT8, rows ^ 128, Scales(scales.t()), zeros=(zeros.t().short() - 128).half(), order=order)
