"""What computes an engine's keys and values: where two are equal, what the one computed the other may read."""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from wingbeat.runtime.verifier.checkpoints.digests import weights_digest

if TYPE_CHECKING:
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

_PACKAGES = ("wingbeat", "torch", "transformers")


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
        "device": loaded.computed_on,
        "block_size": str(block_size),
        "version": " ".join(f"{package} {version(package)}" for package in _PACKAGES),
    }
