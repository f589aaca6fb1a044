"""Whether a verifier's rounds are worth bfloat16 on this CPU: tried, not guessed.

Few rows take as long in float32, whose weights lie in two bytes too where those hold them; many take half in bfloat16.
"""

import hashlib
import logging
import os
import platform
from pathlib import Path

import torch

from wingbeat.kernels.disk_cache import cache_dir, keep, recall
from wingbeat.runtime.parts import first
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import load_model
from wingbeat.runtime.verifier.loading.round_trial import ROWS, decode_rounds, least_seconds, share
from wingbeat.runtime.verifier_errors import UnsupportedModelError

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16)
_LEAST_GAIN = 0.9
"""Of the time in float32, what rounds must come down to: they are less exact."""


def has_bfloat16_units() -> bool:
    """Whether this CPU multiplies bfloat16 itself (AVX512-BF16 or AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def load_in_faster_dtype(folder: Path, device: torch.device, deterministic: bool = False) -> LoadedModel:
    """A verifier in bfloat16 where its rounds are clearly shorter so, else in float32; one log line says which.

    What was found is kept on disk: an engine that starts again writes the text that it wrote before.

    Args:
        folder: the checkpoint, stored in bfloat16: its weights lose nothing.
        deterministic: as for `load_model`.

    Raises:
        UnsupportedModelError: the model would be served wrongly or not at all in float32.
    """
    path = cache_dir() / f"dtype-{_key(folder, deterministic)}.json"
    kept = recall(path, lambda fields: {str(dtype): dtype for dtype in _DTYPES}[fields["dtype"]])
    if kept is not None:
        return load_model(folder, kept, device, deterministic)
    exact = load_model(folder, torch.float32, device, deterministic)
    try:
        rounded = load_model(folder, torch.bfloat16, device, deterministic)
    except UnsupportedModelError as error:
        logger.warning("torch.float32, since bfloat16 is refused: %s", error)
        keep(path, {"dtype": str(exact.dtype)})
        return exact
    seconds = least_seconds({loaded.dtype: decode_rounds(loaded) for loaded in (exact, rounded)})
    chosen = rounded if share(seconds[rounded.dtype], seconds[exact.dtype]) < _LEAST_GAIN else exact
    figures = "; ".join(f"{dtype}: {' / '.join(f'{1e3 * s:.2f}' for s in row)}" for dtype, row in seconds.items())
    logger.info("%s: rounds of %s rows take ms, by dtype: %s", chosen.dtype, " / ".join(map(str, ROWS)), figures)
    keep(path, {"dtype": str(chosen.dtype)})
    return chosen


def _key(folder: Path, deterministic: bool) -> str:
    machine = (platform.node(), platform.processor(), os.cpu_count(), torch.get_num_threads(), torch.__version__)
    described = repr((machine, first("library_fingerprint"), (folder / "config.json").read_text(), deterministic))
    return hashlib.sha256(described.encode()).hexdigest()[:16]
