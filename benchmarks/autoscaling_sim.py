"""Policies of scaling over a simulated day: requests lost, waiting, replica hours.

    .venv/bin/python benchmarks/autoscaling_sim.py [--peak-per-s 2] [--max-replicas 8]

Made-up requests and engines (`simulated_fleet.py`), the real policies: Wingbeat's by tokens, and Ray Serve's own by
requests, each under Serve's own delays. Both see the same requests, the same routing to the least loaded engine, and
engines that take waiting requests from each other.
"""

import argparse
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ray.serve.autoscaling_policy import _apply_delay_logic
from ray.serve.config import AutoscalingConfig
from report import RESULTS, Report, Table, machine_facts
from simulated_fleet import DAY_S, NUM_SLOTS, START_S, SimulatedEngine, SimulatedRequest, day

from wingbeat.cluster.autoscaling import DELAYS, SteadyNeed, desired_replicas

TICK_S = 1.0
"""And between two reports of the replicas."""
LOOK_BACK_S = 30.0
MAX_QUEUED = 256

Policy = Callable[[list[SimulatedEngine], int, float], float]
"""From the engines, the target and the time to the replicas wanted."""


class Way(NamedTuple):
    """A policy, and how fast what it wants is done."""

    name: str
    policy: Policy
    upscale_delay_s: float
    downscale_delay_s: float


@dataclass
class Outcome:
    """One day under one policy."""

    way: str
    num_requests: int = 0
    num_lost: int = 0
    waits_s: list[float] = field(default_factory=list)
    """From arrival to the first token."""
    replica_s: float = 0.0
    num_changes: int = 0

    def percentile(self, share: float) -> float:
        """Of the waits."""
        return sorted(self.waits_s)[int(share * (len(self.waits_s) - 1))]


def by_requests(target: float) -> Policy:
    """Serve's default: the mean over its look-back of the requests present, over a target of each replica."""
    seen: deque[float] = deque(maxlen=int(LOOK_BACK_S / TICK_S))

    def policy(engines: list[SimulatedEngine], current: int, now: float) -> float:
        seen.append(sum(engine.num_requests for engine in engines))
        return sum(seen) / len(seen) / target

    return policy


def by_tokens(target_queue_s: float) -> Policy:
    """Wingbeat's."""
    steady = SteadyNeed()

    def policy(engines: list[SimulatedEngine], current: int, now: float) -> float:
        need = desired_replicas([engine.load(now) for engine in engines], target_queue_s)
        return steady.replicas(need, current, now, **DELAYS)

    return policy


def simulate(way: Way, requests: list[SimulatedRequest], day_s: float, most: int) -> Outcome:
    """One day."""
    outcome, now, target, state = Outcome(way.name), 0.0, 1, {}
    config = AutoscalingConfig(
        min_replicas=1,
        max_replicas=most,
        upscale_delay_s=way.upscale_delay_s,
        downscale_delay_s=way.downscale_delay_s,
    )
    engines, coming = [SimulatedEngine(0.0)], deque(requests)
    while now < day_s or any(engine.num_requests for engine in engines):
        ready = [engine for engine in engines if engine.ready_s <= now and not engine.leaving]
        while coming and coming[0].arrived_s < now + TICK_S:
            _send(coming.popleft(), ready, outcome)
        if any(engine.num_requests > NUM_SLOTS for engine in ready):
            _balance(ready)
        for engine in engines:
            if engine.ready_s <= now and engine.num_requests:
                outcome.waits_s += [request.started_s - request.arrived_s for request in engine.run(now, TICK_S)]
        engines = [engine for engine in engines if not (engine.leaving and not engine.num_requests)]
        outcome.replica_s += TICK_S * len(engines)
        now += TICK_S
        desired = math.ceil(way.policy(ready, target, now))
        wanted, state = _apply_delay_logic(desired, target, config, state, _now=now)
        wanted = max(1, min(most, wanted))
        outcome.num_changes += wanted != target
        target = wanted
        _scale(engines, target, now)
    return outcome


def _send(request: SimulatedRequest, ready: list[SimulatedEngine], outcome: Outcome) -> None:
    outcome.num_requests += 1
    if sum(engine.num_requests for engine in ready) >= len(ready) * NUM_SLOTS + MAX_QUEUED:
        outcome.num_lost += 1
        return
    min(ready, key=lambda engine: engine.num_requests).waiting.append(request)


def _balance(ready: list[SimulatedEngine]) -> None:
    """Engines with free slots take what waits for others."""
    for engine in ready:
        while engine.num_requests < NUM_SLOTS:
            fullest = max(ready, key=lambda other: other.num_requests)
            if fullest.num_requests <= NUM_SLOTS or not fullest.waiting:
                return
            engine.waiting.append(fullest.waiting.popleft())


def _scale(engines: list[SimulatedEngine], target: int, now: float) -> None:
    staying = [engine for engine in engines if not engine.leaving]
    for _ in range(target - len(staying)):
        engines.append(SimulatedEngine(now + START_S))
    ready = sorted((engine for engine in staying if engine.ready_s <= now), key=lambda engine: engine.num_requests)
    for engine in ready[: max(0, min(len(staying) - target, len(ready) - 1))]:
        engine.leaving = True
        others = [other for other in ready if not other.leaving]
        while engine.waiting:
            min(others, key=lambda other: other.num_requests).waiting.append(engine.waiting.popleft())


def ways() -> list[Way]:
    """What is compared."""
    serve = AutoscalingConfig()
    slow = serve.upscale_delay_s, serve.downscale_delay_s
    own = DELAYS["upscale_delay_s"], DELAYS["downscale_delay_s"]
    return [
        Way("Serve's default: 2 requests per replica", by_requests(2.0), *slow),
        Way("Serve's: 8 requests per replica", by_requests(8.0), *slow),
        Way("by tokens, target_queue_s 2", by_tokens(2.0), *own),
        Way("by tokens, target_queue_s 5", by_tokens(5.0), *own),
    ]


def row(outcome: Outcome) -> tuple[str, ...]:
    """Of the table."""
    waits = (f"{outcome.percentile(share):.2f}" for share in (0.5, 0.99, 1.0))
    hours = f"{outcome.replica_s / 3600:.1f}"
    return outcome.way, f"{outcome.num_lost}", *waits, hours, f"{outcome.num_changes}"


def main() -> None:
    """Simulate, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peak-per-s", type=float, default=2.0, help="requests per second after noon")
    parser.add_argument("--max-replicas", type=int, default=8)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a day of one hour: shows that it runs")
    parser.add_argument("--output", type=Path, default=RESULTS / "autoscaling_sim.json")
    args = parser.parse_args()
    day_s = 3600.0 if args.quick else DAY_S
    outcomes: list[Outcome] = []
    for way in ways():
        requests = list(day(random.Random(args.seed), args.peak_per_s, day_s))
        outcomes.append(simulate(way, requests, day_s, args.max_replicas))
        print(row(outcomes[-1]), flush=True)
    columns = "policy", "lost", "first token after s, median", "p99", "longest", "replica hours", "changes"
    facts: dict[str, Any] = machine_facts() | {
        "workload": f"{outcomes[0].num_requests} requests of {day_s / 3600:g} h, "
        f"{args.peak_per_s:g}/s at the peak, bursts of twice that; 1 to {args.max_replicas} replicas of "
        f"{NUM_SLOTS} slots, {START_S:g} s to start one"
    }
    figures = {"rows": [dict(zip(columns, row(outcome), strict=True)) for outcome in outcomes]}
    report = Report(
        "Scaling over a day", facts, [Table("Scaling over a day", columns, list(map(row, outcomes)))], figures
    )
    report.show()
    report.save(args.output)


if __name__ == "__main__":
    main()
