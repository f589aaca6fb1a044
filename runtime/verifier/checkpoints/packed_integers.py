"""Weights of linear layers as GPTQ and AWQ pack them, unpacked: several small integers to an int32, lowest bits first.

    weight[out, in] = (quantised[in, out] - zero[group of in, out]) * scale[group of in, out]

Formats: GPTQ packs eight (at four bits) inputs of an output to a number, AWQ eight outputs of an input; AWQ's lie in an
order of their own (`_AWQ_ORDER`), GPTQ's older files hold zeros less one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wingbeat.runtime.tensor_files import ModelCheckpointError

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the first to eighth of a number's outputs lie in it."""
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def unpack_linears(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """A checkpoint's tensors with a float32 `weight` [out, in] in the place of what a linear layer was packed into.

    Args:
        tensors: by name.
        settings: `quantization_config`.

    Raises:
        ModelCheckpointError: it is packed in a way that is not read here; names the field and its value.
    """
    method, num_bits = settings["quant_method"], settings.get("bits", settings.get("w_bit"))
    widths, layouts = ((4,), ("gemm",)) if method == "awq" else ((2, 4, 8), ("gptq", "gptq_v2"))
    field = "version" if method == "awq" else "checkpoint_format"
    layout = str(settings.get(field, layouts[0])).lower()
    for name, value, known in (("bits", num_bits, widths), (field, layout, layouts)):
        if value not in known:
            raise ModelCheckpointError(
                f"quantization_config: {name} is {value!r}; of {method}, {', '.join(map(str, known))} can be read"
            )
    plain: dict[str, Tensor] = {}
    packed: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if part in _PARTS:
            packed.setdefault(layer, {})[part] = tensor
        else:
            plain[name] = tensor
    for layer, parts in packed.items():
        _check(layer, parts, num_bits, by_input=method == "awq")
        plain[f"{layer}.weight"] = _awq(parts) if method == "awq" else _gptq(parts, num_bits, layout == "gptq")
    return plain


def _check(layer: str, parts: Mapping[str, Tensor], num_bits: int, by_input: bool) -> None:
    """Hold the parts of one layer against each other."""
    absent = [part for part in _PARTS[:3] if part not in parts]
    if absent:
        raise ModelCheckpointError(f"tensor {layer}.{absent[0]} is missing beside {layer}.{next(iter(parts))}")
    packed, (num_groups, outputs) = parts["qweight"], parts["scales"].shape
    each = 32 // num_bits
    rows, columns = packed.shape
    inputs, wanted = (rows, outputs // each) if by_input else (rows * each, outputs)
    if columns != wanted or parts["qzeros"].shape != (num_groups, outputs // each) or inputs % num_groups:
        shapes = ", ".join(f"{name} {list(parts[name].shape)}" for name in _PARTS[:3])
        raise ModelCheckpointError(f"the tensors of {layer} do not fit together: {shapes}")
    groups = parts.get("g_idx")
    if groups is not None and (groups.shape != (inputs,) or groups.min() < 0 or groups.max() >= num_groups):
        raise ModelCheckpointError(f"tensor {layer}.g_idx does not name one of {num_groups} groups for {inputs} inputs")


def _gptq(parts: Mapping[str, Tensor], num_bits: int, one_less: bool) -> Tensor:
    numbers = _unpacked(parts["qweight"], num_bits).transpose(1, 2).flatten(0, 1)  # [in, out]
    zeros = _unpacked(parts["qzeros"], num_bits).flatten(1) + int(one_less)
    groups = parts["g_idx"].long() if "g_idx" in parts else None
    return _scaled(numbers, zeros, parts["scales"], groups)


def _awq(parts: Mapping[str, Tensor]) -> Tensor:
    numbers, zeros = (_unpacked(parts[name], 4)[..., _AWQ_ORDER].flatten(1) for name in ("qweight", "qzeros"))
    return _scaled(numbers, zeros, parts["scales"], None)


def _unpacked(packed: Tensor, num_bits: int) -> Tensor:
    """int32 [a, b] -> int32 [a, b, numbers in each]"""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    return (packed[..., None] >> shifts) & (2**num_bits - 1)


def _scaled(numbers: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None) -> Tensor:
    """Integers [in, out] -> float32 weight [out, in].

    Args:
        groups: int64 [in]; None has as many inputs in each as in the next.
    """
    if groups is None:
        groups = torch.arange(len(numbers)) // (len(numbers) // len(scales))
    return ((numbers - zeros[groups]) * scales.float()[groups]).t().contiguous()
