"""How many threads a verifier's rounds are worth on this machine, as it is now: tried, not guessed.

A second thread may share its core with the first, or with a process that leaves it nothing.
"""

import logging
from functools import partial

import torch

from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.round_trial import ROWS, Round, decode_rounds, least_seconds, share

logger = logging.getLogger(__name__)

_LEAST_GAIN = 0.9
"""Of the time with fewer threads, what more of them must come down to: cores are others' too."""


def choose_threads(loaded: LoadedModel, most: int) -> int:
    """Try decode rounds with one thread, two, four and so on; set torch's number to the least that pays.

    Args:
        most: cores that the process may have.
    """
    rounds = decode_rounds(loaded)

    def with_threads(count: int) -> list[Round]:
        torch.set_num_threads(count)
        return rounds()

    counts = [1 << bits for bits in range(max(most, 1).bit_length())]
    seconds = least_seconds({count: partial(with_threads, count) for count in counts})
    chosen = least_that_pays(seconds)
    torch.set_num_threads(chosen)
    figures = "; ".join(f"{count}: {' / '.join(f'{1e3 * s:.2f}' for s in row)}" for count, row in seconds.items())
    logger.info("%d threads: rounds of %s rows take ms, by threads: %s", chosen, " / ".join(map(str, ROWS)), figures)
    return chosen


def least_that_pays(seconds: dict[int, list[float]]) -> int:
    """The most threads of which each step up made the passes, taken together, clearly shorter."""
    chosen = min(seconds)
    for count in sorted(seconds):
        if share(seconds[count], seconds[chosen]) < _LEAST_GAIN:
            chosen = count
    return chosen
