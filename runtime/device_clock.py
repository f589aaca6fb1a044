"""Measures the seconds that a device spends in each stage.

GPUs are timed with CUDA events, for which the host does not wait; CPUs are timed with the host clock.
"""

import time
from collections import deque
from typing import Any

import torch

MOST_PENDING = 64
"""Maximum number of intervals whose events are pending on the device. While so many are pending, further intervals are
not measured."""


class DeviceClock:
    """Times intervals of one thread's work on one device: `began = clock.begin()`, then `clock.end("verify", began)`.

    Intervals may be nested. No interval may begin while a graph is captured.

    Args:
        events: factory of timed events, instead of CUDA's; for tests.
    """

    def __init__(self, device: torch.device | str, events: Any = None) -> None:
        on_cuda = torch.device(device).type == "cuda"
        self._new_event = events or (lambda: torch.cuda.Event(enable_timing=True)) if on_cuda or events else None
        self._spare: list[Any] = []
        self._pending: deque[tuple[str, Any, Any]] = deque()
        self._seconds: dict[str, float] = {}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage, summed over the intervals that have finished."""
        self._collect()
        return dict(self._seconds)

    def reset(self) -> None:
        """Resets all sums and drops pending intervals."""
        self._seconds.clear()
        self._pending.clear()

    def begin(self) -> Any:
        """Starts an interval; returns None if the interval is not measured."""
        if self._new_event is None:
            return time.perf_counter()
        if len(self._pending) >= MOST_PENDING:
            self._collect()
            if len(self._pending) >= MOST_PENDING:
                return None
        return self._mark()

    def end(self, stage: str, began: Any) -> None:
        """Ends an interval: the device time of work enqueued since `began` is added to this stage."""
        if self._new_event is None:
            self._add(stage, time.perf_counter() - began)
        elif began is not None:
            self._pending.append((stage, began, self._mark()))

    def _mark(self) -> Any:
        event = self._spare.pop() if self._spare else self._new_event()
        event.record()
        return event

    def _collect(self) -> None:
        while self._pending and self._pending[0][2].query():
            stage, began, ended = self._pending.popleft()
            self._add(stage, began.elapsed_time(ended) / 1e3)
            self._spare += [began, ended]

    def _add(self, stage: str, seconds: float) -> None:
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
