"""Identity of an engine's KV: engines with equal identities can read each other's saved prefixes."""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from wingbeat.runtime.verifier.checkpoints.digests import weights_digest

if TYPE_CHECKING:
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

_PACKAGES = ("wingbeat", "torch", "transformers")


def identity_of(folder: Path, loaded: "LoadedModel", block_size: int, kv_cache_dtype: str = "auto") -> dict[str, str]:
    """Returns the identity of an engine: entries by name.

    Args:
        kv_cache_dtype: value of the engine's setting with this name.

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
