"""Replicas over time, by Serve's own delay logic: a steady load keeps them, and a burst has more within seconds."""

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from ray.serve import autoscaling_policy
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig

from wingbeat.cluster.autoscaling import DELAYS, STEADY_S, ReplicaLoad, SteadyNeed, TokenLoadPolicy

TICK_S, REPORT_S, START_S = 0.5, 1.0, 8.0
SLOTS, TOKENS_PER_S = 4, 100.0
SHORT = {"upscale_delay_s": 1.0, "downscale_delay_s": 4.0}
MINUTE_S, WARM_S = 60.0, 120.0


@dataclass
class Replica:
    """Runs `SLOTS` requests at once, each at the same speed; a request is its client and the tokens that are left."""

    ready_s: float
    queue: list[list] = field(default_factory=list)
    reported: tuple[float, ReplicaLoad] | None = None

    def run(self) -> list[int | None]:
        """A tick's work; the clients of the requests that ended."""
        for request in self.queue[:SLOTS]:
            request[1] -= TOKENS_PER_S * TICK_S
        ended = [request for request in self.queue if request[1] <= 0]
        self.queue = [request for request in self.queue if request[1] > 0]
        return [client for client, _ in ended]

    def report(self, now: float) -> None:
        """Measure the load, at most once in `REPORT_S`."""
        if self.reported is None or now - self.reported[0] >= REPORT_S:
            waiting, rate = len(self.queue), SLOTS * TOKENS_PER_S
            tokens = sum(left for _, left in self.queue)
            self.reported = now, ReplicaLoad(waiting, min(waiting, SLOTS), tokens, 0.0, SLOTS, rate)


class Fleet:
    """Replicas of one deployment as Serve adds and removes them, and their requests.

    Args:
        delays: of Serve.
        clients: ask, read the answer, pause, and ask again.
        per_s: at a moment, further requests that arrive in a second, at random.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        delays: dict[str, float],
        clients: int = 0,
        per_s: Callable[[float], float] = lambda now: 0.0,
        seed: int = 1,
        least: int = 1,
    ) -> None:
        self.now, self.target, self.changes = 0.0, 1, []
        monkeypatch.setattr(autoscaling_policy, "time", SimpleNamespace(time=lambda: self.now))
        self._config = AutoscalingConfig(min_replicas=least, max_replicas=8, **delays)
        self._policy, self._state = _apply_autoscaling_config(TokenLoadPolicy(1.0)), {}
        self._replicas, self._rng, self._per_s = [Replica(0.0)], random.Random(seed), per_s
        self._asking = [(self._rng.expovariate(1.0), client) for client in range(clients)]

    def run(self, seconds: float) -> "Fleet":
        """So many seconds."""
        for _ in range(int(seconds / TICK_S)):
            self._arrive()
            for replica in self._replicas:
                ended = [client for client in replica.run() if client is not None]
                self._asking += [(self.now + self._rng.expovariate(1.0), client) for client in ended]
            self.now += TICK_S
            if self._replicas:
                self._scale(self._wanted())
        return self

    def reversals(self) -> list[tuple]:
        """Changes after the first minutes that a second change undoes within a minute, in pairs."""
        late = [change for change in self.changes if change[0] > WARM_S]
        pairs = itertools.pairwise(late)
        return [(one, two) for one, two in pairs if two[0] - one[0] < MINUTE_S and one[1] in (two[2], *range(two[2]))]

    def _arrive(self) -> None:
        ready = [replica for replica in self._replicas if replica.ready_s <= self.now]
        due = deque(client for at, client in self._asking if at <= self.now)
        self._asking = [(at, client) for at, client in self._asking if at > self.now]
        within = self._rng.expovariate(1.0)
        while within < self._per_s(self.now) * TICK_S:
            due.append(None)
            within += self._rng.expovariate(1.0)
        while due and ready:
            least = min(ready, key=lambda replica: len(replica.queue))
            least.queue.append([due.popleft(), self._rng.expovariate(1 / TOKENS_PER_S)])

    def _wanted(self) -> int:
        for replica in self._replicas:
            if replica.ready_s <= self.now:
                replica.report(self.now)
        reported = [replica.reported for replica in self._replicas if replica.reported is not None]
        metrics = {
            name: {key: [SimpleNamespace(timestamp=at, value=getattr(load, name))] for key, (at, load) in pairs}
            for name, pairs in ((name, list(enumerate(reported))) for name in ReplicaLoad._fields)
        }
        context = SimpleNamespace(
            raw_metrics=metrics,
            target_num_replicas=self.target,
            current_num_replicas=len(reported),
            total_num_requests=0,
            policy_state=self._state,
            current_time=self.now,
            config=self._config,
        )
        wanted, self._state = self._policy(context)
        return max(self._config.min_replicas, min(self._config.max_replicas, wanted))

    def _scale(self, wanted: int) -> None:
        if wanted != self.target:
            self.changes.append((self.now, self.target, wanted))
        self.target, stay = wanted, self._replicas[:wanted]
        left = [request for replica in self._replicas[wanted:] for request in replica.queue]
        self._replicas = stay + [Replica(self.now + START_S) for _ in range(wanted - len(stay))]
        if stay:
            stay[0].queue += left


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("delays", [DELAYS, SHORT], ids=["default", "short"])
def test_eight_clients_with_pauses_keep_the_replicas_that_they_have(monkeypatch, delays, seed):
    fleet = Fleet(monkeypatch, delays, clients=8, seed=seed).run(600)
    assert fleet.changes, "the clients are work for several replicas"
    assert not [change for change in fleet.changes if change[0] > WARM_S]


@pytest.mark.parametrize("delays", [DELAYS, {"upscale_delay_s": 5.0, "downscale_delay_s": 30.0}], ids=["300", "30"])
def test_requests_that_arrive_at_random_bring_no_replica_to_and_fro(monkeypatch, delays):
    fleet = Fleet(monkeypatch, delays, per_s=lambda now: 4.0).run(900)
    assert fleet.target > 1
    assert not fleet.reversals()


def test_a_burst_brings_replicas_after_serves_delay_and_its_end_takes_them(monkeypatch):
    burst = (100.0, 160.0)
    fleet = Fleet(monkeypatch, DELAYS, per_s=lambda now: 20.0 if burst[0] <= now < burst[1] else 0.2).run(1200)
    first, *_ = fleet.changes
    assert burst[0] <= first[0] <= burst[0] + DELAYS["upscale_delay_s"] + 3 * REPORT_S
    assert first[2] > 3
    assert fleet.target == 1


@pytest.mark.parametrize(("delays", "within_s"), [(DELAYS, 320.0), (SHORT, 15.0)], ids=["default", "short"])
def test_the_last_replica_goes_when_nobody_asks(monkeypatch, delays, within_s):
    fleet = Fleet(monkeypatch, delays, per_s=lambda now: 0.5 if now < 50 else 0.0, least=0).run(50 + within_s)
    assert fleet.target == 0


def test_requests_that_end_before_a_replica_could_start_bring_none(monkeypatch):
    fleet = Fleet(monkeypatch, DELAYS, per_s=lambda now: 8.0 if 30 <= now < 31 else 0.0).run(60)
    assert not fleet.changes


def test_a_gap_at_the_end_of_the_delay_decides_nothing():
    """Needs of 2.3 with one gap each, so that three replicas would have become one, then two, then three again."""
    steady, gap = SteadyNeed(), 0.4
    for second in range(300):
        assert steady.replicas(2.3 if second % 7 else gap, 3, float(second), 5.0, 4.0) == 3, second
    fewer = [steady.replicas(1.5 if second % 7 else gap, 3, float(second), 5.0, 4.0) for second in range(300, 400)]
    assert fewer[int(STEADY_S) - 10] == 3
    assert 1 < fewer[-1] <= 2


def test_a_clock_that_was_set_back_forgets_what_it_dated_later():
    steady = SteadyNeed()
    assert steady.replicas(7.0, 1, 5000.0) == 7.0
    assert steady.replicas(2.0, 1, 100.0) == 2.0
