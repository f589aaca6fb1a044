"""Reads the announcement of tensors, in vLLM's format, that a trainer sends before it broadcasts them."""

from collections.abc import Mapping
from typing import Any

import torch

from wingbeat.runtime.rollouts.served_weights import WeightsRefused, shown

DTYPES = {shown(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
PACKED_BYTES = 1 << 30
"""Default of vLLM's `packed_buffer_size_bytes`, in bytes."""
PIECE_BYTES = 1 << 28
"""Bytes of tensors that make up one piece. All tensors of a piece are received before any of them is written. If one
tensor cannot be used, no tensor of its piece is written.
"""
_FIELDS = {"names", "dtype_names", "shapes", "packed", "packed_buffer_size_bytes", "packed_num_buffers"}


def announced_tensors(info: Mapping[str, Any]) -> list[tuple[str, list[int], torch.dtype]]:
    """Return name, shape and dtype of each tensor that a broadcast's `update_info` (vLLM) announces.

    Raises:
        WeightsRefused: a field is wrong or unsupported. CUDA IPC handles, for example, are refused because they are
            pickles.
    """
    if others := sorted(info.keys() - _FIELDS):
        raise WeightsRefused(f"update_info.{others[0]} is not supported: give files, or names, dtype_names and shapes")
    columns = [info.get(name) for name in ("names", "dtype_names", "shapes")]
    if not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        raise WeightsRefused("update_info must have names, dtype_names and shapes, lists of one length")
    size = info.get("packed_buffer_size_bytes", PACKED_BYTES)
    if not isinstance(size, int) or size < 1:
        raise WeightsRefused("update_info.packed_buffer_size_bytes must be a whole number above 0")
    announced, seen = [], set()
    for name, dtype, shape in zip(*columns, strict=True):
        if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES:
            raise WeightsRefused(f"update_info: {name} is {dtype}: dtype_names must be of {', '.join(DTYPES)}")
        if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise WeightsRefused(f"update_info: the shape of {name} must be a list of whole numbers")
        if name in seen:
            raise WeightsRefused(f"update_info: {name} is announced twice")
        seen.add(name)
        announced.append((name, shape, DTYPES[dtype]))
    return announced
