"""Dequantises the weights of heads. An optional part reads quantised files; without that part, an error is raised for
them.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from wingbeat.runtime.heads.files import object_field
from wingbeat.runtime.heads.layouts import UnsupportedCheckpointError
from wingbeat.runtime.parts import first_result

_FIELDS = ("quantization_config", "compression_config")
_QUANTISED = re.compile(
    r"\.(qweight|absmax|quant_map|weight_(packed|shape|g_idx)|\w+_(scale|scale_inv|scale_2|zero_point))$"
)
"""Names of tensors that only quantised files have."""


def plain_shapes(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors after dequantisation.

    Args:
        raw: fields of config.json.
        shapes: shapes of the file's tensors.

    Raises:
        UnsupportedCheckpointError: the quantisation is not supported.
    """
    quantised = _quantised(raw, shapes)
    return dict(shapes) if quantised is None else quantised.shapes(shapes)


def plain_tensors(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a checkpoint after dequantisation, quantised weights as float32.

    Raises:
        CheckpointError: parts of a weight do not fit together, or the quantisation is not supported.
    """
    quantised = _quantised(raw, tensors)
    return dict(tensors) if quantised is None else quantised.tensors(tensors)


def _quantised(raw: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Reader of the quantisation stated by config.json or by a tensor's name; None for unquantised weights."""
    body = object_field(raw, "transformer_layer_config")
    stated = [object_field(part, field) for part in (raw, body) for field in _FIELDS]
    settings = next((one for one in stated if one), {})
    name = next((name for name in names if _QUANTISED.search(name)), None)
    if not settings and name is None:
        return None
    if (reader := first_result("quantised_head", settings)) is None:
        way = f"quant_method={settings.get('quant_method')!r}" if settings else name
        raise UnsupportedCheckpointError(
            f"a head quantised by {way} is not supported: no installed part reads quantised weights"
        )
    return reader
