"""Digests of a checkpoint's files: of what decides its text, and of what says which token is which."""

import hashlib
import json
from pathlib import Path

from wingbeat.kernels import disk_cache

_WEIGHTS = (".safetensors", ".bin")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_PIECE_BYTES = 1 << 22


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
