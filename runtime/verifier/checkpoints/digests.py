"""Computes two digests of a checkpoint: of its config and weights, and of its tokenizer files."""

import hashlib
import json
from pathlib import Path

from wingbeat.kernels import disk_cache

_WEIGHTS = (".safetensors", ".bin")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_PIECE_BYTES = 1 << 22


def weights_digest(folder: Path) -> str:
    """Returns a hash, as 32 hex digits, of a checkpoint's config and all bytes of its weights.

    The digest is cached on disk, keyed by file sizes and modification times, so that a restart does not read the
    weights again.

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
    """Refuses a checkpoint that has changed.

    Raises:
        ValueError: the folder's `weights_digest` differs from `digest`.
    """
    if weights_digest(folder) != digest:
        raise ValueError(f"{folder} has changed since its weights were pushed: push them again, from another folder")


def tokenizer_digest(folder: Path) -> str:
    """Returns a hash, as 32 hex digits, of the files that define the vocabulary.

    Raises:
        OSError: a file cannot be read.
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
