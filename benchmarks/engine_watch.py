"""Polls the engines of an application, and derives recovery times from the samples."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from wingbeat.deployments.fleet.directory import DIRECTORY

POLL_S = 0.1
STALE_S = 3.0
"""Age in seconds above which an engine's figures are considered outdated."""
ANSWER_S = 30.0
"""Timeout in seconds for an engine's figures: an engine answers between rounds only, and may wait for a stuck
drafter."""
WINDOW_S = 1.0
"""Window in seconds over which acceptance is computed."""
FULL_SHARE = 0.9
"""Share of the undisturbed acceptance that counts as recovered; the margin covers random variation within a window."""


class Sample(NamedTuple):
    """Figures of an engine at one time."""

    at_s: float
    pid: int
    """Process id of the replica."""
    engine_pid: int
    drafter_pid: int
    incarnation: int
    attached: bool
    num_rounds: int
    num_running: int
    num_accepted_tokens: int
    """Accepted draft tokens so far."""


def sample_of(stats: dict[str, Any], at_s: float) -> Sample:
    """Builds a sample from the result of a verifier's `stats`."""
    return Sample(
        at_s,
        stats["pid"],
        stats["engine_pid"],
        stats["drafter_pid"],
        stats["drafter_incarnation"],
        stats["drafter_state"] == "attached",
        stats["phases"]["num_rounds"],
        stats["num_running"],
        stats["speculation"]["num_accepted_tokens"],
    )


class EngineWatch:
    """Polls every live engine of an application ten times a second, from one event loop."""

    def __init__(self, app_name: str) -> None:
        self.samples: dict[str, list[Sample]] = {}
        """Samples by engine id, in chronological order."""
        self._handle = serve.get_deployment_handle("Verifier", app_name=app_name)
        self._followers: dict[str, asyncio.Task] = {}

    async def run(self) -> None:
        """Polls until cancelled."""
        await self._handle.stats.remote()  # the handle learns of the engines with its first call
        try:
            while True:
                for engine_id in self.live() - self._followers.keys():
                    self._followers[engine_id] = asyncio.create_task(self._follow(engine_id))
                await asyncio.sleep(POLL_S)
        finally:
            for follower in self._followers.values():
                follower.cancel()
            await asyncio.gather(*self._followers.values(), return_exceptions=True)

    def live(self) -> frozenset[str]:
        """Ids of the engines that Serve reports as running."""
        return DIRECTORY.engines(self._handle.deployment_id)

    def latest(self) -> dict[str, Sample]:
        """Latest sample of every live engine that has answered recently."""
        now = time.perf_counter()
        known = {engine_id: self.samples[engine_id][-1] for engine_id in self.live() & self.samples.keys()}
        return {engine_id: sample for engine_id, sample in known.items() if now - sample.at_s < STALE_S}

    async def check_integrity(self) -> None:
        """Checks that the KV blocks of every live engine add up; raises if they do not."""
        for engine_id in self.live():
            await asyncio.wait_for(_awaited(self._handle.check_integrity.remote(engine_id=engine_id)), ANSWER_S)

    async def _follow(self, engine_id: str) -> None:
        while engine_id in self.live():
            # An engine that dies answers with an error; Serve removes it from the list a little later.
            with contextlib.suppress(ray.exceptions.RayError, RayServeException, TimeoutError):
                stats = await asyncio.wait_for(_awaited(self._handle.stats.remote(engine_id=engine_id)), ANSWER_S)
                self.samples.setdefault(engine_id, []).append(sample_of(stats, time.perf_counter()))
            await asyncio.sleep(POLL_S)


async def _awaited(response: Any) -> Any:
    return await response


def acceptance(first: Sample, last: Sample, between: Sequence[Sample] = ()) -> float:
    """Accepted tokens per round and running sequence between two samples of an engine; 0 without a round."""
    running = [sample.num_running for sample in (first, *between, last)]
    rows = (last.num_rounds - first.num_rounds) * sum(running) / len(running)
    return (last.num_accepted_tokens - first.num_accepted_tokens) / rows if rows else 0.0


def first_at(samples: Sequence[Sample], after_s: float, holds: Callable[[Sample], bool]) -> float | None:
    """Seconds from `after_s` to the first later sample for which `holds` is true; None if there is none."""
    found = next((sample.at_s for sample in samples if sample.at_s >= after_s and holds(sample)), None)
    return None if found is None else found - after_s


def full_acceptance_at(samples: Sequence[Sample], after_s: float, undisturbed: float) -> float | None:
    """Seconds from `after_s` to the start of the first window with nearly the undisturbed acceptance.

    Args:
        samples: samples of one engine.
        undisturbed: see `acceptance`.

    Returns:
        None if no window reaches it.
    """
    later = [sample for sample in samples if sample.at_s >= after_s]
    for start, first in enumerate(later):
        end = next((i for i, one in enumerate(later) if one.at_s >= first.at_s + WINDOW_S), None)
        if end is None:
            return None
        if acceptance(first, later[end], later[start + 1 : end]) >= FULL_SHARE * undisturbed:
            return first.at_s - after_s
    return None
