"""Reads the metadata and tensor table of a GGUF file in one pass over its header.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. The package `gguf` can also read metadata
    and table, but takes a minute for a vocabulary of 262 thousand tokens.
"""

import math
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wingbeat.runtime.tensor_files import ModelCheckpointError

_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I8": np.int8, "I32": np.int32, "I64": np.int64}
_MAGIC, _VERSIONS, _MOST_DIMENSIONS = b"GGUF", (2, 3), 4
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value types by number, as `struct` format characters."""


class GgufTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    tensor_type: Any
    """A `gguf.GGMLQuantizationType`."""
    shape: tuple[int, ...]
    """Shape with the innermost dimension first."""
    file: Path
    begin: int
    """Offset of the tensor's data in the file, in bytes."""
    num_bytes: int

    @property
    def data(self) -> np.ndarray:
        """Content, read from the file on each access: numbers, or uint8 [..., bytes of a row] for packed formats."""
        return self._read(self.begin, self.num_bytes, self.shape[1:])

    def part(self, index: int) -> np.ndarray:
        """Returns `data[index]`, and reads only that part of the file."""
        size = self.num_bytes // self.shape[-1]
        return self._read(self.begin + index * size, size, self.shape[1:-1])

    def _read(self, begin: int, num_bytes: int, rows: tuple[int, ...]) -> np.ndarray:
        own, plain = np.fromfile(self.file, np.uint8, num_bytes, offset=begin), _PLAIN.get(self.tensor_type.name)
        return (own if plain is None else own.view(plain)).reshape(*reversed(rows), -1)


class GgufFile(NamedTuple):
    """Metadata fields and tensors of a file."""

    fields: dict[str, Any]
    tensors: list[GgufTensor]


class _Head:
    """Sequential reader of the bytes before the tensors."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def number(self, code: str) -> Any:
        found = struct.unpack_from(f"<{code}", self.data, self.at)[0]
        self.at += struct.calcsize(code)
        return found

    def string(self) -> str:
        size = self.number("Q")
        text = bytes(self.data[self.at : self.at + size])
        if len(text) < size:
            raise ValueError("a string is longer than the file")
        self.at += size
        return text.decode("utf-8", errors="replace")

    def name(self) -> str:
        """Reads the name of a field or tensor. The name must be printable, because error messages quote it."""
        if not (name := self.string()).isprintable():
            raise ValueError("a name holds control characters")
        return name

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        kind, count = self.number("I"), self.number("Q")
        if count > len(self.data):
            raise ValueError("an array is longer than the file")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind) for _ in range(count)]
        code = f"<{count}{_NUMBERS[kind]}"
        found = list(struct.unpack_from(code, self.data, self.at))
        self.at += struct.calcsize(code)
        return found


def read_gguf(file: Path) -> GgufFile:
    """Metadata and tensors of a file; for the first part of a split model, the tensors of all parts.

    Raises:
        ModelCheckpointError: the file is truncated or damaged, or a part is missing; the message is one line that names
            file and tensor.
    """
    first = _read_part(file)
    if first.fields.get("split.count", 1) in (0, 1):
        return first
    parts = parts_of(file.resolve())
    if not parts or first.fields.get("split.no", 0) != 0:
        raise ModelCheckpointError(
            f"{file} is a part of a split model: give the first part, whose name ends in -00001-of-0000N.gguf"
        )
    absent = [part for part in parts if not part.is_file()]
    if absent:
        raise ModelCheckpointError(
            f"{file} is the first of {len(parts)} parts, but {absent[0].name} is missing in its folder"
        )
    return GgufFile(first.fields, [*first.tensors, *(one for part in parts[1:] for one in _read_part(part).tensors)])


def parts_of(file: Path) -> list[Path]:
    """All files of a split model, given any of these files; empty if `file` is not part of a split model."""
    named = _PART.fullmatch(file.name)
    if named is None:
        return []
    count = int(named["count"])
    return [file.with_name(f"{named['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]


def _read_part(file: Path) -> GgufFile:
    try:
        return _read(file, np.memmap(file, mode="r").view(np.ndarray))
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError, struct.error, OSError) as error:
        raise ModelCheckpointError(f"{file} is truncated or damaged: {type(error).__name__}: {error}") from error


def _read(file: Path, data: np.ndarray) -> GgufFile:
    head = _Head(memoryview(data))
    if bytes(data[:4]) != _MAGIC:
        raise ValueError("the file does not start with the bytes GGUF")
    head.at = 4
    if (version := head.number("I")) not in _VERSIONS:
        raise ValueError(f"version {version}")
    num_tensors, num_fields = head.number("Q"), head.number("Q")
    fields = {}
    for _ in range(num_fields):
        name = head.name()
        fields[name] = head.value(head.number("I"))
    found = [_tensor_at(head) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", 32)
    begin = -(-head.at // alignment) * alignment
    return GgufFile(fields, [_tensor(file, len(data), begin, *one) for one in found])


def _tensor_at(head: _Head) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dimensions = head.name(), head.number("I")
    if num_dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
    return name, tuple(head.number("Q") for _ in range(num_dimensions)), head.number("I"), head.number("Q")


def _tensor(file: Path, size: int, begin: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    form = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[form]
    count = math.prod(shape)
    if not count:
        raise ValueError(f"tensor {name} is empty: its shape is {list(reversed(shape))}")
    if count % block or (shape and shape[0] % block):
        raise ValueError(
            f"tensor {name} of {form.name} has rows of {shape[0]} numbers, not a multiple of the block size"
        )
    num_bytes = count // block * block_bytes
    if (behind := begin + offset + num_bytes - size) > 0:
        raise ValueError(f"tensor {name} ends {behind} bytes after the end of the file")
    return GgufTensor(name, form, shape, file, begin + offset, num_bytes)
