"""Chooses the number of CPU threads for a verifier's or drafter's passes by timing rounds.

A second thread may share its core with the first thread, or with a process that leaves it no time. Between two passes
the other process runs; waking threads that fell asleep meanwhile is part of a pass.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch

from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.round_trial import Round, decode_rounds, least_seconds, share

logger = logging.getLogger(__name__)

_ROWS = (8, 16)
"""Rows of a tree, and of several requests. A single row, for which waking threads costs what they gain, is rarer."""
_LEAST_GAIN = 0.95
"""With twice the threads, rounds must take less than this fraction of the time: other processes need cores too."""
_PAUSE_S = 0.5e-3
"""Seconds; longer than idle threads spin before they sleep."""


def choose_threads(loaded: LoadedModel, most: int) -> int:
    """Times decode rounds with decreasing thread counts and sets torch to the chosen count, which is returned.

    Args:
        most: number of cores that the process may use.
    """
    rounds = decode_rounds(loaded, _ROWS)

    def with_threads(count: int) -> list[Round]:
        torch.set_num_threads(count)
        return rounds()

    chosen = tried("verifier", _ROWS, with_threads, most)
    torch.set_num_threads(chosen)
    return chosen


def tried(whose: str, rows: tuple[int, ...], with_threads: Callable[[int], list[Round]], most: int) -> int:
    """Returns the largest power of two of threads such that half as many are clearly slower.

    Counts are halved until that holds, so a large model, whose rounds on one thread are long, is tried with one thread
    only if two do not pay.

    Args:
        whose: name for the log.
        rows: row counts of the passes, for the log.
        with_threads: prepares passes that run on the given number of threads.
        most: largest number of threads.
    """
    chosen, told = 1 << max(most, 1).bit_length() - 1, {}
    while chosen > 1:
        fewer = chosen // 2
        seconds = least_seconds({count: partial(with_threads, count) for count in (fewer, chosen)}, _PAUSE_S)
        told |= seconds
        if share(seconds[chosen], seconds[fewer]) < _LEAST_GAIN:
            break
        chosen = fewer
    figures = "; ".join(f"{count}: {' / '.join(f'{1e3 * s:.2f}' for s in row)}" for count, row in told.items())
    of = " / ".join(map(str, rows))
    logger.info("%s: %d threads; passes of %s rows take ms, by threads: %s", whose, chosen, of, figures)
    return chosen
