"""Puts tensors into a safetensors file in memory that another process of the machine can map."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
_ALIGNMENT = 8
NAME = "wingbeat-weights"
"""Name of the files, which `/proc` shows."""


@contextmanager
def shared_file(tensors: Mapping[str, Any]) -> Iterator[str]:
    """Context manager that yields a path of this machine at which the tensors can be read.

    Args:
        tensors: torch tensors or numpy arrays, by name.

    Raises:
        TypeError, OSError: the errors of `memory_file`.
    """
    fd = memory_file(tensors)
    try:
        yield path_of(fd)
    finally:
        os.close(fd)


def path_of(fd: int) -> str:
    """Path by which other processes of the machine open a file of this process."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def memory_file(tensors: Mapping[str, Any]) -> int:
    """Writes tensors to a new safetensors file in memory; returns the descriptor of the file.

    Args:
        tensors: torch tensors or numpy arrays, by name.

    Raises:
        TypeError: a value is no dense tensor or numpy array of floats.
        OSError: there is not enough memory for a copy.
    """
    held, header, end = [], {}, 0
    for name, value in tensors.items():
        try:
            tensor = torch.as_tensor(value).detach().cpu().contiguous()
            numbers = tensor.view(-1)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name} is no tensor of numbers: {str(error).partition(chr(10))[0]}") from None
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}: weights are floats")
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, 0]}
        header[name]["data_offsets"][1] = end = end + tensor.nbytes
        held.append(numbers.view(torch.uint8).numpy())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    fd = os.memfd_create(NAME)
    try:
        for part in (len(text).to_bytes(8, "little"), text, *held):
            _write(fd, memoryview(part))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write(fd: int, part: memoryview) -> None:
    while part.nbytes:
        part = part[os.write(fd, part) :]
