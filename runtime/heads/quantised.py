"""Heads whose files hold eight or four bits for a number: read as the weights that these stand for.

What is read: float8 and int8 beside scales (of a tensor, of rows, of blocks of a row or of squares), as
compressed-tensors, FP8 checkpoints and ModelOpt write them; four and eight bits as compressed-tensors packs them; GPTQ
and AWQ.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wingbeat.runtime.heads.files import CheckpointError, object_field
from wingbeat.runtime.heads.layouts import UnsupportedCheckpointError
from wingbeat.runtime.tensor_files import ModelCheckpointError
from wingbeat.runtime.verifier.checkpoints.packed_integers import unpack_linears

_INTEGERS = ("gptq", "awq")
_FIELDS = ("quantization_config", "compression_config")
_OF_ACTIVATIONS = re.compile(r"\.(input_scale|input_zero_point|input_global_scale|[kqv]_scale|output_scale)$")
"""What a file says of numbers that are no weights."""
_PACKED, _SCALE, _INVERSE = ".weight_packed", ".weight_scale", ".weight_scale_inv"
_PARTS = (_PACKED, _SCALE, _INVERSE, ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale")


def plain_shapes(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """A checkpoint's shapes as they are once its weights are plain.

    Args:
        raw: config.json

    Raises:
        UnsupportedCheckpointError: they are quantised in a way that is not read.
    """
    settings = _settings(raw)
    _check(settings, shapes)
    plain = {}
    for name, shape in shapes.items():
        layer, _, part = name.rpartition(".")
        if part == "qweight":
            packed = 32 // _bits(settings)
            by_input = settings["quant_method"] == "awq"
            plain[f"{layer}.weight"] = (shape[1] * packed, shape[0]) if by_input else (shape[1], shape[0] * packed)
        elif name.endswith(_PACKED):
            plain[f"{layer}.weight"] = (shape[0], shape[1] * (32 // _bits(settings)))
        elif not _is_part(name, settings):
            plain[name] = shape
    return plain


def plain_tensors(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors, weights that were quantised in float32.

    Raises:
        CheckpointError: parts of a weight do not fit together, or it is quantised in a way that is not read.
    """
    settings = _settings(raw)
    _check(settings, tensors)
    if settings.get("quant_method") in _INTEGERS:
        try:
            return unpack_linears(tensors, settings)
        except ModelCheckpointError as error:
            raise CheckpointError(str(error)) from error
    plain = {name: tensor for name, tensor in tensors.items() if not _is_part(name, settings)}
    for name in tensors:
        layer = name.removesuffix(_PACKED)
        if layer != name:
            plain[f"{layer}.weight"] = _unpacked(layer, tensors, _bits(settings))
        for suffix in (_SCALE, _INVERSE):
            layer = name.removesuffix(suffix)
            if layer != name and f"{layer}{_PACKED}" not in tensors:
                plain[f"{layer}.weight"] = _scaled(layer, tensors, tensors[name], _block(settings))
    return plain


def _settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the weights are quantised, as far as the config says it."""
    body = object_field(raw, "transformer_layer_config")
    parts = [object_field(part, field) for part in (raw, body) for field in _FIELDS]
    return next((part for part in parts if part), {})


def _check(settings: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    """Refuse what is quantised in another way."""
    method, packed = settings.get("quant_method"), any(name.endswith((_PACKED, ".qweight")) for name in names)
    wrong = None
    if any(name.endswith(".qweight") for name in names) and method not in _INTEGERS:
        wrong = f"quant_method={method!r} with packed weights"
    elif any(name.endswith((".weight_global_scale", ".weight_scale_2")) for name in names):
        wrong = "weights of four-bit floating-point numbers (NVFP4)"
    elif packed and method not in _INTEGERS and _bits(settings) not in (4, 8):
        wrong = f"num_bits={_bits(settings)}"
    elif any(name.endswith((".absmax", ".quant_map")) for name in names):
        wrong = "bitsandbytes"
    if wrong is not None:
        raise UnsupportedCheckpointError(
            f"a head quantised by {wrong} is not supported: fp8, int8, and four bits of compressed-tensors, GPTQ and "
            "AWQ are"
        )


def _bits(settings: Mapping[str, Any]) -> Any:
    """Of a packed number."""
    groups = object_field(settings, "config_groups").values()
    stated = [object_field(group, "weights").get("num_bits") for group in groups if isinstance(group, Mapping)]
    given = settings.get("bits", settings.get("w_bit", next(iter(stated), 4)))
    if given not in (2, 4, 8):
        raise UnsupportedCheckpointError(f"a head quantised to {given!r} bits is not supported: 2, 4 and 8 are")
    return given


def _is_part(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a tensor is no weight, but what one is made of."""
    integers = settings.get("quant_method") in _INTEGERS and name.endswith((".qweight", ".qzeros", ".scales", ".g_idx"))
    return integers or name.endswith(_PARTS) or _OF_ACTIVATIONS.search(name) is not None


def _block(settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Rows and columns that share a scale; None where the config says nothing."""
    groups = object_field(settings, "config_groups").values()
    stated = [object_field(group, "weights").get("block_structure") for group in groups if isinstance(group, Mapping)]
    given = settings.get("weight_block_size") or next(iter(stated), None)
    sizes = isinstance(given, list) and len(given) == 2 and all(isinstance(size, int) and size > 0 for size in given)
    return tuple(given) if sizes else None


def _scaled(layer: str, tensors: Mapping[str, Tensor], scale: Tensor, block: tuple[int, ...] | None) -> Tensor:
    """[out, in] of eight bits each, times a scale of all, of each row, of parts of each row, or of squares."""
    weight = tensors.get(f"{layer}.weight")
    if weight is None:
        raise CheckpointError(f"missing tensor {layer}.weight beside its scale")
    if f"{layer}.weight_zero_point" in tensors and bool(tensors[f"{layer}.weight_zero_point"].any()):
        raise UnsupportedCheckpointError(f"tensor {layer}.weight_zero_point: weights of eight bits have none here")
    if scale.ndim == 1 and len(scale) > 1:
        scale = scale[:, None]
    return weight.float() * _spread(layer, scale.float(), weight.shape, block)


def _spread(layer: str, scale: Tensor, shape: tuple[int, ...], block: tuple[int, ...] | None = None) -> Tensor:
    """Scales [a, b] -> [out, in], each for as many rows and columns as fit; the last block may be cut off.

    Args:
        block: as `_block`; taken where there are as many scales as such blocks.
    """
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.ndim != 2 or len(shape) != 2 or any(part > whole for part, whole in zip(scale.shape, shape, strict=True)):
        raise CheckpointError(f"the scales {list(scale.shape)} of {layer}.weight do not fit its {list(shape)}")
    for dim, whole in enumerate(shape):
        # A power of two where the last block is cut off, as all tools have them.
        width = -(-whole // scale.shape[dim])
        if whole % scale.shape[dim]:
            width = 1 << (width - 1).bit_length()
        if block is not None and -(-whole // block[dim]) == scale.shape[dim]:
            width = block[dim]
        if -(-whole // width) != scale.shape[dim]:
            raise CheckpointError(f"the scales {list(scale.shape)} of {layer}.weight do not fit its {list(shape)}")
        scale = scale.repeat_interleave(width, dim).narrow(dim, 0, whole)
    return scale


def _unpacked(layer: str, tensors: Mapping[str, Tensor], num_bits: int) -> Tensor:
    """[out, in] of signed integers of a few bits, several to an int32, lowest bits first, times scales of groups."""
    packed, scale = tensors[f"{layer}{_PACKED}"], tensors.get(f"{layer}{_SCALE}")
    if scale is None:
        raise CheckpointError(f"missing tensor {layer}{_SCALE}")
    if f"{layer}.weight_g_idx" in tensors:
        raise UnsupportedCheckpointError(f"tensor {layer}.weight_g_idx: groups in another order are not supported")
    numbers = _numbers(packed, num_bits).flatten(1)
    shape = tensors.get(f"{layer}.weight_shape")
    if shape is not None:
        numbers = numbers[:, : int(shape[1])]
    zeros = tensors.get(f"{layer}.weight_zero_point")
    if zeros is not None:
        # Packed along the rows, as weights are along the columns.
        rows = _numbers(zeros.t(), num_bits).flatten(1).t()[: len(scale)]
        numbers = numbers - _spread(layer, rows.contiguous().float(), numbers.shape)
    return numbers.float() * _spread(layer, scale.float(), numbers.shape)


def _numbers(packed: Tensor, num_bits: int) -> Tensor:
    """int32 [a, b] -> int32 [a, b, numbers in each], of a signed range around zero."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & (2**num_bits - 1)) - 2 ** (num_bits - 1)
