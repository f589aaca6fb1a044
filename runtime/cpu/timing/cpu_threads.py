"""Chooses the number of CPU threads for a verifier's or drafter's passes by timing rounds.

A second thread may share its core with the first thread, or with a process that keeps the core busy. Between two passes
of a process, other processes run and the threads of the process fall asleep. The time to wake these threads is part of
the next pass.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch

from wingbeat.runtime.cpu.timing.round_trial import Round, decode_rounds, least_seconds, share
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

_ROWS = (8, 16)
"""Numbers of rows of the timed passes: a tree's rows, and several requests' rows. Passes of a single row are not timed,
because such passes are rarer and because the time that more threads save in such a pass equals the time to wake the
threads.
"""
_LEAST_GAIN = 0.95
"""Twice as many threads are used only if rounds then take less than this fraction of the time, because other processes
need cores too."""
_PAUSE_S = 0.5e-3
"""Seconds of pause before a timed pass. Idle threads sleep before the pause is over, so the timed pass includes the
time to wake them.
"""


def choose_threads(loaded: LoadedModel, most: int) -> int:
    """Times decode rounds with decreasing numbers of threads; sets torch to the chosen number and returns that number.

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
    """Returns a number of threads, a power of two, for which half as many threads are clearly slower.

    The search starts at `most`, rounded down to a power of two, and halves the number until half as many threads are
    clearly slower. A large model, whose rounds on one thread are long, is therefore timed with one thread only if four
    threads were not clearly faster than two.

    Args:
        whose: name for the log.
        rows: row counts of the passes, for the log.
        with_threads: function that prepares passes for a given number of threads.
        most: maximum number of threads.
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
