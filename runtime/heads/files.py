"""Reads the files of a drafter's checkpoint: config.json and tensors, whole or sharded, safetensors or PyTorch.

Does not interpret the tensors. No code in a file is executed, because pickles are loaded with `weights_only`.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.hugging_face import first_line
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.tensor_files import ModelCheckpointError, read_fields, weight_files

_SIGNS_OF_CODE = ("GLOBAL ", "Can only create", "Can only build", "unrecognized function", "must be imported")

Value = TypeVar("Value")


class CheckpointError(ValueError):
    """A drafter checkpoint cannot be read; the message names the file, the tensor or the config field."""


class DamagedCheckpointError(CheckpointError):
    """A file is truncated or not of the format that its name implies."""


class UnsafeCheckpointError(CheckpointError):
    """A pickle contains code in addition to weights."""


def find_folder(path: str | Path) -> Path:
    """The folder itself, or the local copy of a hub repository.

    Raises:
        CheckpointError: the path is not a folder.
        HubError: the repository cannot be downloaded.
    """
    folder = checkpoint_folder(path)
    if not folder.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of config.json.

    Raises:
        CheckpointError: the file is missing, is not a JSON object, or contains an impossible number.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} has no config.json")
    try:
        fields = read_fields(file)
    except ModelCheckpointError as error:
        raise DamagedCheckpointError(str(error)) from error
    if (problem := first_result("config_problem", fields)) is not None:
        raise CheckpointError(f"{file}: {problem}")
    return fields


def object_field(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that is an object; empty if the field is absent.

    Raises:
        CheckpointError: the field is not an object.
    """
    value = fields.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {name}={value!r} is not an object")
    return value or {}


@contextmanager
def fields_refused() -> Iterator[None]:
    """Converts every exception into a CheckpointError: transformers uses many config fields before it checks them.

    Raises:
        CheckpointError: transformers raised another exception; the message is one line.
    """
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise CheckpointError(f"config.json: {kind}{first_line(error)}") from error


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a checkpoint, by name. Reads no values, if the format allows that.

    Raises:
        CheckpointError: as for `read_tensors`.
    """
    if (shapes := _apart("stored_shapes", folder)) is not None:
        return shapes
    return _read(folder, _safetensors_shapes, lambda file: {k: tuple(v.shape) for k, v in _torch_tensors(file).items()})


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, in host memory.

    Raises:
        CheckpointError: there are no weights, or a shard is missing.
        DamagedCheckpointError: a file is truncated.
        UnsafeCheckpointError: a file contains code.
    """
    found = _apart("stored_tensors", folder)
    return _read(folder, load_file, _torch_tensors) if found is None else found


def _apart(hook: str, folder: Path) -> Any:
    """Shapes or tensors of a checkpoint whose format an optional part reads, see `runtime.parts`; None for other
    formats.
    """
    try:
        return first_result(hook, folder)
    except ModelCheckpointError as error:
        raise DamagedCheckpointError(str(error)) from error


def _read(
    folder: Path,
    read_safetensors: Callable[[Path], dict[str, Value]],
    read_torch: Callable[[Path], dict[str, Value]],
) -> dict[str, Value]:
    try:
        files = weight_files(folder)
    except ModelCheckpointError as error:
        raise CheckpointError(str(error)) from error
    found: dict[str, Value] = {}
    for file in files:
        found |= _guarded(read_safetensors if file.suffix == ".safetensors" else read_torch, file)
    # RoPE frequencies, which old files contain as buffers, are dropped, because heads compute them from the config.
    return {key: value for key, value in found.items() if not key.endswith("rotary_emb.inv_freq")}


def _guarded(read: Callable[[Path], dict[str, Value]], file: Path) -> dict[str, Value]:
    try:
        return read(file)
    except pickle.UnpicklingError as error:
        # PyTorch raises this error for a pickle with code and for a truncated pickle. Only the message shows which of
        # the two it is.
        if any(sign in str(error) for sign in _SIGNS_OF_CODE):
            raise UnsafeCheckpointError(
                f"{file} holds code beside weights, which is never run: convert the file to safetensors if you trust it"
            ) from error
        # PyTorch's message suggests loading the file with code execution enabled, so the message is not passed on.
        raise _damaged(file, ValueError("PyTorch finds no weights in it")) from error
    except (SafetensorError, EOFError, RuntimeError, OSError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> DamagedCheckpointError:
    reason = first_line(error)
    return DamagedCheckpointError(f"{file} is truncated or damaged ({file.stat().st_size} bytes): {reason}")


def _safetensors_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, framework="pt") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def torch_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a PyTorch file, whose other values are skipped.

    Raises:
        DamagedCheckpointError: the file is truncated.
        UnsafeCheckpointError: the file contains code.
        CheckpointError: the file does not hold a dictionary of tensors.
    """
    return _guarded(lambda file: _torch_tensors(file, others=True), file)


def _torch_tensors(file: Path, others: bool = False) -> dict[str, Tensor]:
    found = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}, not tensors by name")
    if others:
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{file}: {name} is a {type(value).__name__}, not a tensor")
    return found
