"""Parts of a training step's time on a CPU, and a line of the log where its matrix products do not explain it."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils.flop_counter import FlopCounterMode

logger = logging.getLogger(__name__)
_WARM_UP, _JUDGED = 2, 6
"""Steps of a process that are not judged, and those behind them that are."""
_MOST = 2.0
"""A step may take so much longer than its matrix products."""


class StepTimes:
    """Seconds of the parts of the steps so far.

    Args:
        dtype: of the matrix products.
        device: accelerators run behind the host, whose clock tells nothing of them: they are not judged.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._judges = device.type == "cpu"
        self._seconds: dict[str, float] = {}
        self._step = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of a step."""
        before = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - before

    def end_step(self, passes: Callable[[], object]) -> None:
        """Count a step; once, look at where its time goes.

        Args:
            passes: forward and backward pass of a step, whose operations are counted. The run's own are not: counting
                changes the order in which some operations are summed.
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
    """Rate of a matrix product of a head's size on this CPU, the best of three."""
    left, right = torch.ones(512, 576, dtype=dtype), torch.ones(576, 4096, dtype=dtype)
    seconds = []
    for _ in range(3):
        before = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - before)
    return 2 * 512 * 576 * 4096 / min(seconds)
