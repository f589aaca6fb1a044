"""Device times within captured passes: events that a graph records anew whenever it is replayed."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from wingbeat.runtime.graphs.graph_device import CudaGraphDevice, GraphDevice

logger = logging.getLogger(__name__)

NewEvent = Callable[[], Any]
"""Factory of timed events that a capture turns into nodes of the graph."""


class Marks:
    """Points of one captured pass, each with the name of the work since the previous point."""

    def __init__(self) -> None:
        self._points: list[tuple[str, Any]] = []
        self.is_pending = False
        """Whether the graph has been replayed since the marks were read."""

    @property
    def is_timed(self) -> bool:
        """Whether there is work between two points."""
        return len(self._points) > 1

    def add(self, name: str, event: Any) -> None:
        """Adds a point to the pass that is being captured; the first point's name is not used."""
        event.record()
        self._points.append((name, event))

    def read(self) -> dict[str, float]:
        """Returns seconds by name of the latest replay; empty if the replay has not finished or was read before."""
        if not self.is_pending or not self._points[-1][1].query():
            return {}
        self.is_pending = False
        seconds: dict[str, float] = {}
        for (_, before), (name, event) in zip(self._points, self._points[1:], strict=False):
            seconds[name] = seconds.get(name, 0.0) + before.elapsed_time(event) / 1e3
        return seconds


def events_of(device: GraphDevice) -> NewEvent | None:
    """Returns a factory of events for captures on a device; None if a capture there cannot hold timed events."""
    if not isinstance(device, CudaGraphDevice):
        return None
    new_event = partial(torch.cuda.Event, enable_timing=True, external=True)

    def trial() -> tuple[()]:
        new_event().record()
        return ()

    try:
        device.capture(trial, device.new_pool())
    except (RuntimeError, TypeError) as error:
        logger.info("times of captured stages are not taken apart: %s", (str(error).splitlines() or [""])[0])
        return None
    return new_event
