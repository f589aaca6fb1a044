"""Seconds that a device spends in each stage: by CUDA events that nobody waits for, on CPUs by the host's clock."""

import time
from collections import deque
from typing import Any

import torch

MOST_PENDING = 64
"""Stretches whose events the device may still have before it; what comes meanwhile is not measured."""


class DeviceClock:
    """Times stretches of one thread's work on one device: `began = clock.begin()`, then `clock.end("verify", began)`.

    Stretches may lie within each other. None may be begun while a graph is captured.

    Args:
        events: makes timed events, in place of CUDA's.
    """

    def __init__(self, device: torch.device | str, events: Any = None) -> None:
        on_cuda = torch.device(device).type == "cuda"
        self._new_event = events or (lambda: torch.cuda.Event(enable_timing=True)) if on_cuda or events else None
        self._spare: list[Any] = []
        self._pending: deque[tuple[str, Any, Any]] = deque()
        self._seconds: dict[str, float] = {}

    @property
    def seconds(self) -> dict[str, float]:
        """By stage, so far as the device is known to have got."""
        self._collect()
        return dict(self._seconds)

    def reset(self) -> None:
        """Start anew."""
        self._seconds.clear()
        self._pending.clear()

    def begin(self) -> Any:
        """A mark; None where this stretch is not measured."""
        if self._new_event is None:
            return time.perf_counter()
        if len(self._pending) >= MOST_PENDING:
            self._collect()
            if len(self._pending) >= MOST_PENDING:
                return None
        return self._mark()

    def end(self, stage: str, began: Any) -> None:
        """What was given to the device since the mark is of this stage."""
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
