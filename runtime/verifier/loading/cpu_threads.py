"""How many threads a verifier's or a drafter's passes are worth on this machine, as it is now: tried, not guessed.

A second thread may share its core with the first, or with a process that leaves it nothing. Between a pass and the next
it is the other process's turn: what wakes a thread that has fallen asleep meanwhile is part of a pass.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch

from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.round_trial import Round, decode_rounds, least_seconds, share

logger = logging.getLogger(__name__)

_ROWS = (8, 16)
"""Of a tree, and of several requests: a single row, whose waking threads cost what they bring, is the rarer round."""
_LEAST_GAIN = 0.95
"""Of the time with half the threads, what twice as many must come down to: cores are others' too."""
_PAUSE_S = 0.5e-3
"""Longer than threads wait for the next job before they sleep."""


def choose_threads(loaded: LoadedModel, most: int) -> int:
    """Try decode rounds with as many threads as there may be, half of that and so on; set torch's number to what pays.

    Args:
        most: cores that the process may have.
    """
    rounds = decode_rounds(loaded, _ROWS)

    def with_threads(count: int) -> list[Round]:
        torch.set_num_threads(count)
        return rounds()

    chosen = tried("verifier", _ROWS, with_threads, most)
    torch.set_num_threads(chosen)
    return chosen


def tried(whose: str, rows: tuple[int, ...], with_threads: Callable[[int], list[Round]], most: int) -> int:
    """The most threads that pay, of powers of two: half as many take clearly longer. A large model, whose rounds by one
    thread are long, is not tried with one unless two do not pay.

    Args:
        whose: for the log.
        rows: of the passes, for the log.
        with_threads: makes passes ready that so many threads run.
        most: of them.
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
