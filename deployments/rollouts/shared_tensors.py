"""Puts tensors into a safetensors file in memory that another process of the machine can map."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
_ALIGNMENT = 8


@contextmanager
def shared_file(tensors: Mapping[str, Any]) -> Iterator[str]:
    """Context manager that yields a path of this machine at which the tensors can be read.

    Args:
        tensors: torch tensors or numpy arrays, by name.

    Raises:
        TypeError: a value is neither a torch tensor nor a numpy array, or its dtype is not a floating-point dtype.
        OSError: there is not enough memory for a copy.
    """
    held, header, end = [], {}, 0
    for name, value in tensors.items():
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}: weights are floats")
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, 0]}
        header[name]["data_offsets"][1] = end = end + tensor.nbytes
        held.append(tensor.view(-1).view(torch.uint8).numpy())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    fd = os.memfd_create("wingbeat-weights")
    try:
        for part in (len(text).to_bytes(8, "little"), text, *held):
            _write(fd, memoryview(part))
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def _write(fd: int, part: memoryview) -> None:
    while part.nbytes:
        part = part[os.write(fd, part) :]
