"""Fingerprint that identifies the model in a checkpoint without reading the whole checkpoint."""

import hashlib
import json
from pathlib import Path

from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.parts import first_result

_SAMPLES = 32
_SAMPLE_BYTES = 4096
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_FREE_FIELDS = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"})
"""Config fields that vary between copies of the same model."""


def checkpoint_fingerprint(source: Path) -> str:
    """20 hex digits over the config, the sizes of the weight files, and 32 samples of 4 KiB from each file.

    The samples include the first and last bytes of each file. If the format has its config inside the weight file, only
    that file is hashed. A fine-tuned model differs from its base model in nearly all bytes of the weights, so a few
    samples suffice, and the cost does not grow with the model's size.

    Args:
        source: folder or name, as accepted by `checkpoint_folder`.

    Raises:
        FileNotFoundError: the folder has no config.json or no weights.
        ModelCheckpointError: as `checkpoint_folder`.
    """
    digest, folder = hashlib.sha256(), checkpoint_folder(source)
    files = first_result("files_of", folder)
    if files is None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kept = {name: value for name, value in config.items() if name not in _FREE_FIELDS}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES and path.is_file())
    if not files:
        raise FileNotFoundError(f"{folder} holds no weights (.safetensors or .bin)")
    for path in files:
        _add_file(digest, path)
    return digest.hexdigest()[:20]


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "big"))
    last = max(0, size - _SAMPLE_BYTES)
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(last * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
