"""Weight files of a Hugging Face checkpoint: finds the files that transformers reads, and reads their headers.

The module imports no torch and reads no tensor values.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from wingbeat.runtime.folder_kinds import pointer_problem
from wingbeat.runtime.parts import first_result

SAFETENSORS, TORCH_FILE = "model.safetensors", "pytorch_model.bin"
GGUF_FILE = "model.gguf"
"""Weight file of a folder that was created from a GGUF file."""


class ModelCheckpointError(ValueError):
    """A verifier's or draft model's checkpoint cannot be served.

    The message is one line that names the file, tensor or field.
    """


class TensorHeader(NamedTuple):
    """A tensor's entry in the header of a safetensors file."""

    dtype: str
    """Dtype by safetensors' name, such as BF16."""
    shape: tuple[int, ...]
    file: Path


def read_json(file: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
        ModelCheckpointError: the file is absent, unreadable, or holds something else.
    """
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelCheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if (pointer := pointer_problem(file)) is not None:
            raise ModelCheckpointError(pointer) from error
        raise ModelCheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ModelCheckpointError(f"{file} holds a JSON {type(fields).__name__}, it must hold an object")
    return fields


def read_fields(file: Path) -> dict[str, Any]:
    """Reads config.json or generation_config.json; an optional part normalises the values (hook `meant_fields`).

    Raises:
        ModelCheckpointError: as `read_json`.
    """
    fields = read_json(file)
    meant = first_result("meant_fields", fields)
    return fields if meant is None else meant


def stored_dtype(folder: Path) -> str | None:
    """Returns torch's name of the weights' dtype according to config.json; None if the config names no dtype.

    Raises:
        ModelCheckpointError: the file cannot be read.
    """
    fields = read_fields(folder / "config.json")
    for part in (fields, text_fields(fields)):
        for name in ("dtype", "torch_dtype"):
            if isinstance(part.get(name), str):
                return part[name]
    return None


def num_positions(folder: Path) -> int | None:
    """Returns the language model's number of positions according to config.json; None if the config has no such field.

    Raises:
        ModelCheckpointError: the file cannot be read.
    """
    value = text_fields(read_fields(folder / "config.json")).get("max_position_embeddings")
    return value if type(value) is int and value > 0 else None


def text_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the language model's fields; for a multimodal checkpoint, the fields of `text_config`."""
    text = fields.get("text_config")
    return text if isinstance(text, dict) else fields


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files in transformers' order of preference: safetensors, then pickles.

    Raises:
        ModelCheckpointError: there are no weight files, an index names an absent shard, or a shard lacks a tensor of
            the index.
    """
    if (folder / GGUF_FILE).exists():
        return [folder / GGUF_FILE]
    for name in (SAFETENSORS, TORCH_FILE):
        if (folder / name).is_file():
            return [_real(folder / name)]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _shards(index)
    others = sorted(path.name for end in ("*.gguf", "*.safetensors", "*.bin") for path in folder.glob(end))
    beside = f", but {others[0]}" if others else ""
    raise ModelCheckpointError(f"{folder} has neither {SAFETENSORS} nor {TORCH_FILE}, whole or in shards{beside}")


def read_headers(files: list[Path]) -> dict[str, TensorHeader]:
    """Returns the tensor headers of the safetensors files among `files`, by tensor name.

    Raises:
        ModelCheckpointError: a file is truncated or not a safetensors file, or two files hold the same tensor.
    """
    found: dict[str, TensorHeader] = {}
    for file in files:
        if file.suffix != ".safetensors":
            continue
        for name, header in _read_header(file).items():
            if name in found:
                raise ModelCheckpointError(
                    f"tensor {name} is in {found[name].file.name} and in {file.name} of {file.parent}"
                )
            found[name] = header
    return found


def tensor_files(folder: Path) -> dict[str, Path]:
    """Returns the safetensors file of each tensor in a folder, by tensor name; empty without such files.

    Raises:
        ModelCheckpointError: a file is truncated or not a safetensors file.
    """
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with _opened(file) as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    return found


def _shards(index: Path) -> list[Path]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise ModelCheckpointError(f"{index}: weight_map must be an object from tensors to file names")
    names = sorted(set(shards.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelCheckpointError(f"{index} names {outside[0]!r}, which is no file name")
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ModelCheckpointError(f"{index} names {absent[0]}{more}, which is not there")
    _check_places(index, shards)
    return [_real(index.parent / name) for name in names]


def _real(file: Path) -> Path:
    if (pointer := pointer_problem(file)) is not None:
        raise ModelCheckpointError(pointer)
    return file


def _check_places(index: Path, shards: dict[str, str]) -> None:
    """Compares an index with the headers of its shards.

    Pickles are not compared, because they have no headers. Tensors that the index does not list are allowed.
    """
    held: dict[str, set[str]] = {}
    for name, shard in shards.items():
        if not shard.endswith(".safetensors"):
            continue
        if shard not in held:
            with _opened(index.parent / shard) as tensors:
                held[shard] = set(tensors.keys())
        if name not in held[shard]:
            raise ModelCheckpointError(f"{index} has tensor {name} in {shard}, which does not hold it")


def _read_header(file: Path) -> dict[str, TensorHeader]:
    with _opened(file) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return {name: TensorHeader(part.get_dtype(), tuple(part.get_shape()), file) for name, part in slices.items()}


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            yield tensors
    except SafetensorError as error:
        if (pointer := pointer_problem(file)) is not None:
            raise ModelCheckpointError(pointer) from error
        size = file.stat().st_size
        raise ModelCheckpointError(f"{file} is truncated or damaged ({size} bytes): {error}") from error
    except OSError as error:
        raise ModelCheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
