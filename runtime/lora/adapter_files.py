"""Reads a LoRA adapter's tensors from safetensors files, and compares each tensor's shape with that of its linear
layer.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from wingbeat.runtime.lora.adapter import CONFIG_FILE, AdapterError, LinearAdapter, LinearShape

if TYPE_CHECKING:
    from wingbeat.runtime.lora.adapter_config import AdapterConfig

WEIGHTS_FILE, PICKLE_FILE = "adapter_model.safetensors", "adapter_model.bin"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_PIECE_BYTES = 1 << 20


def read_adapter(folder: Path, linears: Mapping[str, LinearShape], max_rank: int) -> dict[str, LinearAdapter]:
    """Reads an adapter; returns its matrices for each linear layer, by the layer's path in the model.

    Args:
        linears: the base model's linear layers that adapters may act on.

    Raises:
        AdapterError: a file is absent or damaged, or the adapter uses an unsupported feature or belongs to another base
            model; the message is one line.
    """
    from wingbeat.runtime.lora.adapter_config import read_config  # imported here because it needs pydantic

    config = read_config(folder)
    try:
        with safe_open(_weights(folder), framework="pt") as file:
            names = _by_module(folder, list(file.keys()))
            for module, sides in names.items():
                _check(folder, module, [file.get_slice(sides[side]) for side in "AB"], config, linears, max_rank)
            _check_all_there(folder, config, linears, names)
            return {
                module: _linear(folder, module, file, sides, config.scale(module)) for module, sides in names.items()
            }
    except SafetensorError as error:
        raise AdapterError(f"{folder / WEIGHTS_FILE} is truncated or damaged: {error}") from None
    except OSError as error:
        raise AdapterError(f"{folder / WEIGHTS_FILE} cannot be read: {error.strerror or error}") from None


def adapter_digest(folder: Path) -> str:
    """Returns a digest of 32 hex digits over an adapter's files; adapters with equal digests have equal effects.

    Raises:
        AdapterError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in (folder / CONFIG_FILE, _weights(folder)):
            with path.open("rb") as file:
                digest.update(path.stat().st_size.to_bytes(8, "big"))
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
    except OSError as error:
        raise AdapterError(f"{error.filename} cannot be read: {error.strerror}") from None
    return digest.hexdigest()[:32]


def _weights(folder: Path) -> Path:
    path = folder / WEIGHTS_FILE
    if not path.is_file() and (folder / PICKLE_FILE).is_file():
        raise AdapterError(f"{folder / PICKLE_FILE} is a pickle, which is not read: save it as {WEIGHTS_FILE}")
    return path


def _by_module(folder: Path, names: list[str]) -> dict[str, dict[str, str]]:
    """Returns, for each module path, the tensor names by matrix ("A" or "B")."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise AdapterError(f"{folder}: tensor {name} is not one of a linear layer's lora_A and lora_B")
        found.setdefault(match["module"], {})[match["side"]] = name
    for module, sides in found.items():
        if len(sides) != 2:
            raise AdapterError(f"{folder}: {module} has lora_{next(iter(sides))} alone, two matrices are needed")
    if not found:
        raise AdapterError(f"{folder}: it has no tensors")
    return found


def _check(
    folder: Path,
    module: str,
    slices: list,
    config: "AdapterConfig",
    linears: Mapping[str, LinearShape],
    max_rank: int,
) -> None:
    """Checks the shapes in the file's headers, so that no tensor of a wrong size is read."""
    shape = linears.get(module)
    if shape is None:
        raise AdapterError(
            f"{folder}: {module} is not a linear layer of the model's decoder layers that supports adapters"
        )
    for part, side in zip(slices, "AB", strict=True):
        if part.get_dtype() not in _DTYPES:
            raise AdapterError(f"{folder}: lora_{side} of {module} is {part.get_dtype()}, it must be of floats")
    rank = config.rank(module)
    if rank > max_rank:
        raise AdapterError(f"{folder}: {module} has rank {rank}, max_lora_rank is {max_rank}")
    for part, side, needed in zip(slices, "AB", ([rank, shape.inputs], [shape.outputs, rank]), strict=True):
        if list(part.get_shape()) != needed:
            raise AdapterError(f"{folder}: lora_{side} of {module} is {list(part.get_shape())}, not {needed}")


def _check_all_there(
    folder: Path, config: "AdapterConfig", linears: Mapping[str, LinearShape], found: Mapping[str, object]
) -> None:
    """Raises an error for an incomplete file. peft ignores missing tensors, so that only a part of the adapter would
    have an effect.
    """
    lacking = [module for module in linears if module not in found and config.targets(module)]
    if lacking:
        more = f" and for {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise AdapterError(
            f"{folder}: {WEIGHTS_FILE} has no tensors for {lacking[0]}{more}: target_modules of {CONFIG_FILE} names it"
        )


def _linear(folder: Path, module: str, file: safe_open, sides: dict[str, str], scale: float) -> LinearAdapter:
    a, b = (file.get_tensor(sides[side]).to(torch.float32) for side in "AB")
    b *= scale
    for tensor, side in ((a, "A"), (b, "B")):
        if not bool(tensor.isfinite().all()):
            raise AdapterError(f"{folder}: lora_{side} of {module} holds a number that is not finite")
    return LinearAdapter(a, b)
