"""How many threads a verifier's or a drafter's passes are worth on this machine, as it is now: tried, not guessed.

A second thread may share its core with the first, or with a process that leaves it nothing. Between a pass and the next
it is the other process's turn: what wakes a thread that has fallen asleep meanwhile is part of a pass.
"""

import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.round_trial import ROWS, Round, decode_rounds, share

logger = logging.getLogger(__name__)

_LEAST_GAIN = 0.9
"""Of the time with fewer threads, what more of them must come down to: cores are others' too."""
_TURNS, _REPEATS = 4, 4
_PAUSE_S = 0.5e-3
"""Longer than threads wait for the next job before they sleep."""


def choose_threads(loaded: LoadedModel, most: int) -> int:
    """Try decode rounds with one thread, two, four and so on; set torch's number to the least that pays.

    Args:
        most: cores that the process may have.
    """
    rounds = decode_rounds(loaded)

    def with_threads(count: int) -> list[Round]:
        torch.set_num_threads(count)
        return rounds()

    chosen = tried("verifier", with_threads, most)
    torch.set_num_threads(chosen)
    return chosen


def tried(whose: str, with_threads: Callable[[int], list[Round]], most: int) -> int:
    """The least number of threads that pays, of one, two, four and so on.

    Args:
        whose: for the log.
        with_threads: makes passes ready, of `ROWS` sequences each, that so many threads run.
        most: of them.
    """
    counts = [1 << bits for bits in range(max(most, 1).bit_length())]
    seconds = _least_seconds({count: partial(with_threads, count) for count in counts}) if len(counts) > 1 else {1: []}
    chosen = least_that_pays(seconds)
    figures = "; ".join(f"{count}: {' / '.join(f'{1e3 * s:.2f}' for s in row)}" for count, row in seconds.items())
    rows = " / ".join(map(str, ROWS))
    logger.info("%s: %d threads; passes of %s rows take ms, by threads: %s", whose, chosen, rows, figures)
    return chosen


def least_that_pays(seconds: dict[int, list[float]]) -> int:
    """The most threads of which each step up made the passes, taken together, clearly shorter."""
    chosen = min(seconds)
    for count in sorted(seconds):
        if count != chosen and share(seconds[count], seconds[chosen]) < _LEAST_GAIN:
            chosen = count
    return chosen


@torch.inference_mode()
def _least_seconds(ways: dict[int, Callable[[], list[Round]]]) -> dict[int, list[float]]:
    """Seconds of each pass by threads, the least of several turns, so that other work meets all of them alike."""
    seconds: dict[int, list[float]] = {}
    for _ in range(_TURNS):
        for count, prepare in ways.items():
            now = [_least(run) for run in prepare()]
            seconds[count] = [min(pair) for pair in zip(seconds.get(count, now), now, strict=True)]
    return seconds


def _least(run: Round) -> float:
    run()
    least = float("inf")
    for _ in range(_REPEATS):
        time.sleep(_PAUSE_S)
        started = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - started)
    return least
