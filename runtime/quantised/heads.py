"""Dequantises draft heads with 8-bit or 4-bit weights.

Supported: float8 and int8 with scales (per tensor, row, block of a row, or square block) from compressed-tensors, FP8
checkpoints and ModelOpt; packed 4-bit and 8-bit integers of compressed-tensors; GPTQ and AWQ.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.heads.layouts import UnsupportedCheckpointError
from wingbeat.runtime.quantised.packed_integers import unpack_linears
from wingbeat.runtime.quantised.scaled_weights import PARTS, bits_of, read_weight
from wingbeat.runtime.tensor_files import ModelCheckpointError

_INTEGERS = ("gptq", "awq")
_OF_ACTIVATIONS = re.compile(r"\.(input_scale|input_zero_point|input_global_scale|[kqv]_scale|output_scale)$")
"""Names of tensors that describe activations, not weights."""
_PACKED = ".weight_packed"


class QuantisedHead(NamedTuple):
    """Dequantiser of a draft head."""

    settings: Mapping[str, Any]
    """`quantization_config`; empty if config.json has none."""

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Shapes of the dequantised weights; see `heads.plain_weights.plain_shapes`."""
        settings, plain = self.settings, {}
        _check(settings, stored)
        for name, shape in stored.items():
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

    def tensors(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The dequantised weights, see `heads.plain_weights.plain_tensors`."""
        settings = self.settings
        _check(settings, stored)
        try:
            if settings.get("quant_method") in _INTEGERS:
                return unpack_linears(stored, settings)
            plain = {name: tensor for name, tensor in stored.items() if not _is_part(name, settings)}
            for layer in dict.fromkeys(layer for name in stored if (layer := _quantised_layer(name)) is not None):
                parts = {part: stored[f"{layer}.{part}"] for part in ("weight", *PARTS) if f"{layer}.{part}" in stored}
                weight = read_weight(layer, parts, settings)
                plain[f"{layer}.weight"] = weight if isinstance(weight, Tensor) else weight.dense()
        except ModelCheckpointError as error:
            raise CheckpointError(str(error)) from error
        return plain


def _quantised_layer(name: str) -> str | None:
    layer, _, part = name.rpartition(".")
    return layer if part in ("weight_packed", "weight_scale", "weight_scale_inv") else None


def _check(settings: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    """Raises UnsupportedCheckpointError if the quantisation is not supported."""
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
    """Number of bits of a packed integer; raises UnsupportedCheckpointError unless it is 2, 4 or 8."""
    given = bits_of(settings)
    if given not in (2, 4, 8):
        raise UnsupportedCheckpointError(f"a head quantised to {given!r} bits is not supported: 2, 4 and 8 are")
    return given


def _is_part(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a tensor is a component of a quantised weight rather than a weight."""
    integers = settings.get("quant_method") in _INTEGERS and name.endswith((".qweight", ".qzeros", ".scales", ".g_idx"))
    return (
        integers
        or name.rpartition(".")[2] in (*PARTS, "weight_global_scale")
        or _OF_ACTIVATIONS.search(name) is not None
    )
