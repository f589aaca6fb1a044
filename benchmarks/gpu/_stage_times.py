"""Device time by stage in the rounds of a running engine, measured between events on its stream."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from _harness import Bench

from wingbeat.runtime.drafters.staged_drafter import StagedDrafter
from wingbeat.runtime.engine.drafter_client import DrafterClient
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_runner import GraphRunner, Stage

STAGES = ("draft", "verify", "accept", "publish")
"""Stages of a round; the rest is small copies between them, and the device waiting for the host."""
_OF_GRAPHS = {Stage.BASE_DECODING: "verify", Stage.BASE_VERIFICATION: "verify", Stage.BASE_CHOICE: "accept"}
Mark = Any
"""A CUDA event, or a time of the host's clock without CUDA."""


class StageTimes:
    """Measures the rounds of one engine while entered; to be entered once."""

    def __init__(self, bench: Bench, engine: Engine) -> None:
        self._on_gpu = bench.device.type == "cuda"
        self._engine = engine
        self._spans: list[tuple[str, Mark, Mark]] = []
        self.stages_ms: dict[str, float] = {}
        """Milliseconds per round, by stage."""
        self.host_ms: dict[str, float] = {}
        """Milliseconds per round on the host, by phase of the engine's clock."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        patched = (
            (GraphRunner, "replay", lambda runner: _OF_GRAPHS.get(runner.stage)),
            (StagedDrafter, "draft", lambda drafter: "draft"),
            (DrafterClient, "publish", lambda client: "publish"),
        )
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
        clock = asdict(self._engine.clock.times)
        for owner, name, stage_of in patched:
            setattr(owner, name, self._timed(getattr(owner, name), stage_of))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)
        self._sum(clock)

    def _timed(self, function: Callable, stage_of: Callable[[Any], str | None]) -> Callable:
        def timed(owner: Any, *args: Any, **kwargs: Any) -> Any:
            stage = stage_of(owner)
            if stage is None:
                return function(owner, *args, **kwargs)
            begin = self._mark()
            result = function(owner, *args, **kwargs)
            self._spans.append((stage, begin, self._mark()))
            return result

        return timed

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _sum(self, before: dict[str, float]) -> None:
        now = asdict(self._engine.clock.times)
        num_rounds = max(now.pop("num_rounds") - before["num_rounds"], 1)
        self.host_ms = {
            name.removesuffix("_s"): 1e3 * (seconds - before[name]) / num_rounds for name, seconds in now.items()
        }
        sums = dict.fromkeys(STAGES, 0.0)
        for stage, begin, end in self._spans:
            sums[stage] += begin.elapsed_time(end) if self._on_gpu else 1e3 * (end - begin)
        if self._on_gpu:
            # A drafter on the same thread is notified within `publish`, and drafts before `publish` returns.
            sums["publish"] -= sums["draft"]
        self.stages_ms = {stage: ms / num_rounds for stage, ms in sums.items()}
