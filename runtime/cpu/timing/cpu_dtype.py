"""Chooses between bfloat16 and float32 on this CPU by timing a verifier's rounds.

Rounds of few rows take equally long in both dtypes, because float32 layers may also store weights in two bytes. Rounds
of many rows can take half the time in bfloat16.
"""

import hashlib
import logging
import os
import platform
from pathlib import Path

import torch

from wingbeat.kernels.disk_cache import cache_dir, keep, recall
from wingbeat.runtime.cpu.timing.round_trial import ROWS, decode_rounds, least_seconds, share
from wingbeat.runtime.number_formats import has_bfloat16_units
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import load_model
from wingbeat.runtime.verifier_errors import UnsupportedModelError

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16)
_LEAST_GAIN = 0.9
"""bfloat16 is used only if its rounds take less than this fraction of the float32 time, because bfloat16 is less exact.
"""


def load_in_faster_dtype(folder: Path, device: torch.device, deterministic: bool = False) -> LoadedModel | None:
    """Loads a verifier in bfloat16 if its rounds are clearly faster, else in float32; logs the choice in one line.

    Returns None, having loaded nothing, if the CPU has no units for bfloat16. The choice is cached on disk, so that a
    restarted engine produces the same text.

    Args:
        folder: a checkpoint stored in bfloat16, so that loading in bfloat16 does not round the weights.
        deterministic: see `load_model`.

    Raises:
        UnsupportedModelError: the model would be served incorrectly or not at all in float32.
    """
    if not has_bfloat16_units():
        return None
    path = cache_dir() / f"dtype-{_key(folder, deterministic)}.json"
    kept = recall(path, lambda fields: {str(dtype): dtype for dtype in _DTYPES}[fields["dtype"]])
    if kept is not None:
        return load_model(folder, kept, device, deterministic)
    exact = load_model(folder, torch.float32, device, deterministic)
    try:
        rounded = load_model(folder, torch.bfloat16, device, deterministic)
    except UnsupportedModelError as error:
        logger.warning("using torch.float32 because bfloat16 is refused: %s", error)
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
    described = repr(
        (machine, first_result("library_fingerprint"), (folder / "config.json").read_text(), deterministic)
    )
    return hashlib.sha256(described.encode()).hexdigest()[:16]
