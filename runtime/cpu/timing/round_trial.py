"""Times a verifier's CPU rounds under several settings.

All settings are timed in each of several turns, so that other load affects all settings alike.
"""

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
"""Numbers of rows of the rounds that are timed."""
_TURNS, _REPEATS = 4, 4
LONG_S = 0.02
"""Rounds longer than this many seconds are timed in two turns only, because disturbances are a small share of such a
round and because start-up waits for the timing."""
_MAX_MODEL_LEN = 256


def decode_rounds(loaded: LoadedModel, rows: tuple[int, ...] = ROWS) -> Callable[[], list[Round]]:
    """Returns a function that builds passes of `rows` sequences with one token each.

    The passes run on torch's number of threads at the time of the call.
    """
    config = EngineConfig(max_num_seqs=max(rows), max_model_len=_MAX_MODEL_LEN, num_kv_blocks=32)
    cache, model = KVCache(loaded.layers, config, loaded.dtype, loaded.device), VerifierModel(loaded)
    num_blocks = _MAX_MODEL_LEN // cache.block_size

    def of(num_rows: int) -> Round:
        batch = dummy_decode_batch(cache, num_rows, 1, num_blocks)
        return lambda: model(batch)

    return lambda: [of(num_rows) for num_rows in rows]


@torch.inference_mode()
def least_seconds(ways: Mapping[Way, Callable[[], list[Round]]], pause_s: float = 0.0) -> dict[Way, list[float]]:
    """Returns the shortest time of each round, in seconds, by setting.

    Rounds are timed in several turns, or in two turns if they are long.

    Args:
        ways: for each setting, a function that applies the setting and returns the rounds to time.
        pause_s: seconds to sleep before each run.
    """
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    for turn in range(_TURNS if len(ways) > 1 else 1):
        if turn > 1 and max(map(max, seconds.values())) > LONG_S:
            break
        for way, prepare in ways.items():
            now = [_least(run, pause_s) for run in prepare()]
            seconds[way] = [min(pair) for pair in zip(seconds[way] or now, now, strict=True)]
    return seconds


def share(seconds: list[float], of: list[float]) -> float:
    """Returns the mean ratio of a setting's round times `seconds` to another setting's round times `of`.

    There is one ratio for each number of rows.
    """
    return sum(now / before for now, before in zip(seconds, of, strict=True)) / len(of)


def _least(run: Round, pause_s: float) -> float:
    run()
    least = float("inf")
    for _ in range(_REPEATS):
        time.sleep(pause_s)
        started = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - started)
        if least > LONG_S:
            break
    return least
