"""Identity of an engine's KV: engines with equal identities can read each other's saved prefixes."""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

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
        "device": _computed_on(loaded),
        "block_size": str(block_size),
        "version": " ".join(f"{package} {version(package)}" for package in _PACKAGES),
    }


def _computed_on(loaded: "LoadedModel") -> str:
    """Returns the device type on which logits are computed.

    In deterministic mode returns the GPU's name, because bits differ between GPU models.
    """
    on_gpu = loaded.deterministic and loaded.device.type == "cuda"
    return torch.cuda.get_device_name(loaded.device) if on_gpu else loaded.device.type
