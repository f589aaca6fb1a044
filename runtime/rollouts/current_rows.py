"""Embedding and output matrix of a verifier since its last update, for drafters that hold copies of them.

A head reads the two matrices from the verifier's checkpoint if its own files lack them. Updates change only the
verifier's memory, so the engine writes new values to a file in memory, from which drafters of the same machine load
their head again.
"""

import os
import secrets
import struct
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from wingbeat.runtime.rollouts.shared_tensors import memory_file, path_of
from wingbeat.runtime.verifier.layers.model_part import ModelPart

STATE = struct.Struct("<16sqq")
"""A mark that tells this file from others, the version of the rows, and the number of the file that holds them."""


class Place(NamedTuple):
    """Where a drafter finds the rows of a verifier on the same machine."""

    path: str
    mark: bytes


class CurrentRows(ModelPart):
    """Rows that an engine publishes to its drafters; nothing is kept before the first call of `place`."""

    name = "rows"

    def __init__(self) -> None:
        self._mark = secrets.token_bytes(16)
        self._state: int | None = None
        self._version, self._file = 0, -1
        self._held: dict[str, Tensor] = {}
        """Published tensors by the suffixes of their names, mapped from the file."""
        self._written: dict[str, Tensor] = {}
        """Tensors of the open update."""

    @property
    def place(self) -> Place:
        """Where drafters find the rows."""
        if self._state is None:
            self._state = os.memfd_create("wingbeat-rows")
            self._say()
        return Place(path_of(self._state), self._mark)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the published rows take."""
        return sum(tensor.nbytes for tensor in self._held.values())

    def put(self, suffix: str, value: Tensor) -> None:
        """Keeps a new value of a matrix until `publish`."""
        if self._state is not None:
            self._written[suffix] = value.detach().to("cpu", copy=True).contiguous()

    def publish(self) -> None:
        """Gives the values of `put` to the drafters."""
        if not self._written:
            return
        old, self._file = self._file, memory_file(self._held | self._written)
        self._held, self._written = read_rows(path_of(self._file)), {}
        self._version += 1
        self._say()
        if old >= 0:
            os.close(old)

    def _say(self) -> None:
        os.pwrite(self._state, STATE.pack(self._mark, self._version, self._file), 0)


def read_rows(path: str) -> dict[str, Tensor]:
    """Maps the tensors of a file, by the suffixes of their names."""
    with torch.device("cpu"), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
