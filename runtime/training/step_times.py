"""Times the phases of training steps on a CPU, and logs a warning if a step takes much longer than its matrix products
should take.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils.flop_counter import FlopCounterMode

logger = logging.getLogger(__name__)
_WARM_UP, _JUDGED = 2, 6
"""Number of steps at the start that are not measured, and number of measured steps after them."""
_MOST = 2.0
"""Ratio of a step's time to the time of its matrix products above which the warning is logged."""


class StepTimes:
    """Seconds spent in each phase of the steps so far.

    Args:
        dtype: dtype of the matrix products.
        device: device of the run; only a CPU is measured, because accelerators run asynchronously to the host's clock.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._judges = device.type == "cpu"
        self._seconds: dict[str, float] = {}
        self._step = 0

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure a phase of a step."""
        before = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - before

    def end_step(self, passes: Callable[[], object]) -> None:
        """Count a step; after the last measured step, compare the steps' time with the time of their matrix products.

        Args:
            passes: runs forward and backward pass of a step again, to count their operations. Operations are not
                counted in the step's actual passes, because counting changes the order of some sums.
        """
        self._step += 1
        if self._step == _WARM_UP:
            self._seconds.clear()
        if not self._judges or self._step != _WARM_UP + _JUDGED:
            return
        with FlopCounterMode(display=False) as counter:
            passes()
        flops, rate = counter.get_total_flops(), flops_per_second(self._dtype)
        seconds, explained = sum(self._seconds.values()) / _JUDGED, flops / rate
        if seconds > _MOST * explained:
            parts = ", ".join(f"{name} {part / _JUDGED:.2f} s" for name, part in self._seconds.items())
            logger.warning(
                "A step takes %.2f s, %.1f times as long as its %.3f TFLOP of matrix products at %.0f GFLOP/s: %s",
                seconds,
                seconds / explained,
                flops / 1e12,
                rate / 1e9,
                parts,
            )


def flops_per_second(dtype: torch.dtype) -> float:
    """Speed in FLOP/s of a matrix product as large as a head's on this CPU, the best of three runs."""
    left, right = torch.ones(512, 576, dtype=dtype), torch.ones(576, 4096, dtype=dtype)
    seconds = []
    for _ in range(3):
        before = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - before)
    return 2 * 512 * 576 * 4096 / min(seconds)
