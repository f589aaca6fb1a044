"""What computes an engine's keys and values: where two are equal, what the one computed the other may read."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from wingbeat.kernels import disk_cache

if TYPE_CHECKING:
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

_WEIGHTS = (".safetensors", ".bin")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_PACKAGES = ("wingbeat", "torch", "transformers")
_PIECE_BYTES = 1 << 22


def identity_of(folder: Path, loaded: "LoadedModel", block_size: int, kv_cache_dtype: str = "auto") -> dict[str, str]:
    """Of an engine, by what each entry is.

    Args:
        kv_cache_dtype: as the engine's limits have it.

    Raises:
        OSError: the checkpoint cannot be read.
    """
    rounded = "" if kv_cache_dtype == "auto" else f" with {kv_cache_dtype} KV"
    return {
        "weights": " ".join([weights_digest(folder), *loaded.computed_by.split()]),
        "dtype": str(loaded.dtype).removeprefix("torch.")
        + rounded
        + (" deterministic" if loaded.deterministic else ""),
        "device": loaded.device.type,
        "block_size": str(block_size),
        "version": " ".join(f"{package} {version(package)}" for package in _PACKAGES),
    }


def weights_digest(folder: Path) -> str:
    """32 hex digits over a checkpoint's config and every byte of its weights.

    What was read is remembered by its files' sizes and times: another start does not read it again.

    Raises:
        OSError: the checkpoint cannot be read.
    """
    files = sorted(path for path in folder.iterdir() if path.name == "config.json" or path.suffix in _WEIGHTS)
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:20]
    kept = disk_cache.cache_dir() / "weights" / f"{key}.json"
    found = disk_cache.recall(kept, lambda fields: str(fields["digest"]))
    if found is None:
        found = _digest(files)
        disk_cache.keep(kept, {"digest": found})
    return found


def check_digest(folder: Path, digest: str) -> None:
    """Refuse a checkpoint that has changed.

    Raises:
        ValueError: its `weights_digest` is another one.
    """
    if weights_digest(folder) != digest:
        raise ValueError(f"{folder} has changed since its weights were pushed: push them again, from another folder")


def tokenizer_digest(folder: Path) -> str:
    """32 hex digits over the files that say which token is which.

    Raises:
        OSError: one cannot be read.
    """
    return _digest([folder / name for name in _TOKENIZER if (folder / name).is_file()])


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()[:32]
