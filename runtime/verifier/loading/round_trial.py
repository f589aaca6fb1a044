"""What a verifier's rounds take on a CPU as they could be run, in turns, so that other work meets all of them alike."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.round.builder import dummy_decode_batch
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.model import VerifierModel

Round = Callable[[], object]
Way = TypeVar("Way", bound=Hashable)

ROWS = (1, 16)
"""Of the rounds that are timed."""
_TURNS, _REPEATS = 4, 4
_MAX_MODEL_LEN = 256


def decode_rounds(loaded: LoadedModel) -> Callable[[], list[Round]]:
    """Makes forward passes of `ROWS` sequences with a token each, for the number of threads torch has at the time."""
    config = EngineConfig(max_num_seqs=max(ROWS), max_model_len=_MAX_MODEL_LEN, num_kv_blocks=32)
    cache, model = KVCache(loaded.layers, config, loaded.dtype, loaded.device), VerifierModel(loaded)
    num_blocks = _MAX_MODEL_LEN // cache.block_size

    def of(num_rows: int) -> Round:
        batch = dummy_decode_batch(cache, num_rows, 1, num_blocks)
        return lambda: model(batch)

    return lambda: [of(num_rows) for num_rows in ROWS]


@torch.inference_mode()
def least_seconds(ways: Mapping[Way, Callable[[], list[Round]]]) -> dict[Way, list[float]]:
    """Seconds of each round by the way it is run: the least of several turns.

    Args:
        ways: each makes its rounds ready.
    """
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(_TURNS if len(ways) > 1 else 1):
        for way, prepare in ways.items():
            now = [_least(run) for run in prepare()]
            seconds[way] = [min(pair) for pair in zip(seconds[way] or now, now, strict=True)]
    return seconds


def share(seconds: list[float], of: list[float]) -> float:
    """What rounds take of what others took, the mean over their sizes."""
    return sum(now / before for now, before in zip(seconds, of, strict=True)) / len(of)


def _least(run: Round) -> float:
    run()
    least = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - started)
    return least
