"""How many threads a verifier's rounds are worth on this machine, as it is now: tried, not guessed.

A second thread may share its core with the first, or with a process that leaves it nothing.
"""

import logging
import time
from collections.abc import Callable, Sequence

import torch

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.verifier.cpu_kernels import reads_in_place
from wingbeat.runtime.verifier.dummy_batch import dummy_decode_batch
from wingbeat.runtime.verifier.loaded_model import LoadedModel
from wingbeat.runtime.verifier.model import VerifierModel

logger = logging.getLogger(__name__)

_ROWS = (1, 16)
_TURNS, _REPEATS = 4, 4
_LEAST_GAIN = 0.9
"""Of the time with fewer threads, what more of them must come down to: cores are others' too."""


@torch.inference_mode()
def choose_threads(loaded: LoadedModel, most: int) -> int:
    """Try decode rounds with one thread, two, four and so on; set torch's number to the least that pays.

    Args:
        most: cores that the process may have.
    """
    config = EngineConfig(max_num_seqs=max(_ROWS), max_model_len=256, num_kv_blocks=32)
    cache, model = KVCache(loaded.layers, config, loaded.dtype, loaded.device), VerifierModel(loaded)
    in_place = reads_in_place(loaded.dtype, loaded.device)

    def run(num_threads: int, num_rows: int) -> Callable[[], object]:
        torch.set_num_threads(num_threads)
        batch = dummy_decode_batch(cache, loaded.windows, num_rows, 1, 256 // cache.block_size, in_place=in_place)
        return lambda: model(batch)

    counts = [1 << bits for bits in range(max(most, 1).bit_length())]
    seconds = least_seconds(counts, _ROWS, run)
    chosen = least_that_pays(seconds)
    torch.set_num_threads(chosen)
    run(chosen, 1)()
    figures = "; ".join(f"{count}: {' / '.join(f'{1e3 * s:.2f}' for s in row)}" for count, row in seconds.items())
    logger.info("%d threads: rounds of %s rows take ms, by threads: %s", chosen, " / ".join(map(str, _ROWS)), figures)
    return chosen


def least_seconds(
    counts: Sequence[int], rows: Sequence[int], prepare: Callable[[int, int], Callable[[], object]]
) -> dict[int, list[float]]:
    """Seconds of a pass by threads, then by rows: the least of several turns, which what else runs meets alike."""
    seconds = {count: [float("inf")] * len(rows) for count in counts}
    for _ in range(_TURNS if len(counts) > 1 else 1):
        for count in counts:
            for index, num_rows in enumerate(rows):
                run = prepare(count, num_rows)
                run()
                for _ in range(_REPEATS):
                    started = time.perf_counter()
                    run()
                    seconds[count][index] = min(seconds[count][index], time.perf_counter() - started)
    return seconds


def least_that_pays(seconds: dict[int, list[float]]) -> int:
    """The most threads of which each step up made the passes, taken together, clearly shorter."""
    chosen = min(seconds)
    for count in sorted(seconds):
        shares = [now / before for now, before in zip(seconds[count], seconds[chosen], strict=True)]
        if sum(shares) / len(shares) < _LEAST_GAIN:
            chosen = count
    return chosen
