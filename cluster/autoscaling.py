"""How many verifiers the load asks for: a pure function of what the replicas report."""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

TARGET_QUEUE_S = 2.0
DELAYS = {"upscale_delay_s": 5.0, "downscale_delay_s": 300.0}
"""Up fast, because requests wait, but not for what is done before a replica could start; down slowly, because a replica
takes a while to come back. Serve's own are 30 and 600 s."""
SPARE = 0.75
"""Of an engine's slots: while so many are free, a request that comes does not queue, and no engine need be added."""

WAKING = {"aggregation_function": "min", "look_back_period_s": 2.0, "metrics_interval_s": 1.0}
"""Serve starts a replica where there is none as soon as a call has waited for one, in the mean of its last 30 s. A call
that just met the end of the last replica is no reason: it has to wait for 2 s."""


WINDOW_S = 5.0
"""Least stretch of time whose mean need counts: the gap between a client's requests is no change of the load."""
RECENT_S = 2.0
"""A burst that ended so long ago adds no replica, though the mean still holds it."""
STEADY_S = 60.0
"""Least time for which fewer replicas must have been enough, however short the delay, before one of several goes; and
for which the mean must exceed the replicas by less than `MARGIN` before one is added."""
MARGIN = 0.8
"""Load of replicas below which others are spare, and above whose inverse more are needed at once: a load about a whole
number of replicas would otherwise take turns between that number and the next one."""


class ReplicaLoad(NamedTuple):
    """What one replica reports; its fields are the names of Serve's metrics."""

    num_requests: float = 0.0
    """Submitted to its engine and not finished."""
    num_started: float = 0.0
    """Of those, that have begun to write."""
    num_tokens: float = 0.0
    """Prompt tokens still to compute, and tokens that the requests are expected to write yet."""
    kv_share: float = 0.0
    """Of its KV pool, that those hold which have begun to write."""
    num_slots: float = 1.0
    """Sequences that its engine runs at once."""
    tokens_per_s: float = 0.0
    """What it was measured to do with work for half its slots or more; 0 before that."""


def desired_replicas(loads: Iterable[ReplicaLoad], target_queue_s: float) -> float:
    """Replicas that do all the work there is within `target_queue_s`, which is what a request that comes may wait then.

    Never fewer than hold what runs; never more than it takes to have `SPARE` of the slots free, when nothing waits.

    Args:
        loads: of every replica that runs; at least one.
    """
    loads = list(loads)
    num_requests = sum(load.num_requests for load in loads)
    num_slots = sum(load.num_slots for load in loads) / len(loads)
    held = max(sum(load.num_started for load in loads) / num_slots, sum(load.kv_share for load in loads))
    most = num_requests / (num_slots * (1 - SPARE))
    rates = [load.tokens_per_s for load in loads if load.tokens_per_s]
    if rates:
        rate = sum(rates) / len(rates)
        most = min(most, sum(load.num_tokens for load in loads) / (rate * target_queue_s))
    return max(held, most)


Points = deque[tuple[float, float]]
"""Moments, and a value at each."""


class SteadyNeed:
    """Replicas to ask Serve for, from the need of each moment.

    Serve lets a wish stand for its delay and then carries out what the policy wishes at that moment, which may be a gap
    between two requests. So a wish is that of a stretch of time: for more, the mean need of the latest window; for
    fewer, the largest such mean since fewer began to be enough.
    """

    def __init__(self) -> None:
        self._forget(0.0)

    def replicas(
        self, need: float, target: int, now: float, upscale_delay_s: float = 0.0, downscale_delay_s: float = 0.0
    ) -> float:
        """Replicas to ask for; the target where neither more nor fewer are wished for.

        Args:
            need: of this moment, as `desired_replicas`.
            target: replicas that run or are on their way.
            now: seconds.
            upscale_delay_s, downscale_delay_s: of Serve.
        """
        if not self._needs or now < self._needs[-1][0]:  # the clock was set back
            self._forget(now)
        window_s = max(WINDOW_S, upscale_delay_s)
        _keep(self._needs, need, now, max(STEADY_S, window_s))
        mean = _mean(self._needs, now - window_s)
        steady_s = max(0.0, STEADY_S - downscale_delay_s) if target > 1 else 0.0
        _keep(self._means, mean, now, steady_s)
        peak = max(mean for _, mean in self._means)
        if peak > MARGIN * (target - 1) or now - self._since < steady_s:
            self._target = -1
            return self._more(mean, target, now)
        self._peak = max(peak, self._peak) if target == self._target else peak
        self._target = target
        return round(self._peak / MARGIN, 6)

    def _more(self, mean: float, target: int, now: float) -> float:
        """The mean of the window where it calls for more than the target, else the target."""
        wanted = min(mean, max(need for at, need in self._needs if at >= now - RECENT_S))
        lasts = now - self._since >= STEADY_S and _mean(self._needs, now - STEADY_S) > target
        return round(wanted, 6) if wanted > target and (lasts or MARGIN * wanted > target) else target

    def _forget(self, now: float) -> None:
        self._since = now
        """When the first need was seen: before that the load may have been anything."""
        self._needs, self._means = Points(), Points()
        """The needs of the latest minute; the means of the window in the time before a wish for fewer replicas."""
        self._target, self._peak = -1, 0.0
        """Replicas of which fewer are enough, and the largest mean since; -1 where fewer are not."""


def _keep(points: Points, value: float, now: float, window_s: float) -> None:
    """Add a moment's value, and drop those before the window."""
    points.append((now, value))
    while points[0][0] < now - window_s:
        points.popleft()


def _mean(points: Points, since: float) -> float:
    values = [value for at, value in points if at >= since]
    return sum(values) / len(values)


class TokenLoadPolicy:
    """Serve's view of `desired_replicas`: bounds, delays and smoothing are applied by Serve to what this returns.

    Serve's own policy counts calls, and to Serve a router's whole traffic is one endless stream.
    """

    def __init__(self, target_queue_s: float = TARGET_QUEUE_S) -> None:
        self._target_queue_s = target_queue_s
        self._steady = SteadyNeed()

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Desired replicas (Serve rounds up) and an empty state: Serve keeps this object as long as its settings stay.

        Args:
            context: `ray.serve.config.AutoscalingContext` of the Verifier deployment.
        """
        loads, target = replica_loads(context.raw_metrics or {}), context.target_num_replicas
        if not loads:
            # A replica that is still starting reports nothing: no load seen is no reason to scale.
            return target, {}
        need = desired_replicas(loads, self._target_queue_s)
        now = getattr(context, "current_time", None) or time.time()
        config = getattr(context, "config", None)  # Serve's type says that a context may lack both
        delays = (DELAYS[name] if config is None else getattr(config, name) for name in DELAYS)
        return self._steady.replicas(need, target, now, *delays), {}


def replica_loads(metrics: Mapping[str, Mapping[Any, Any]]) -> list[ReplicaLoad]:
    """The latest that each replica has reported, of those that have reported all.

    Args:
        metrics: by name and replica, points of time and value, oldest first.
    """
    series = [metrics.get(name, {}) for name in ReplicaLoad._fields]
    replicas = [replica for replica in series[0] if all(one.get(replica) for one in series)]
    return [ReplicaLoad(*(one[replica][-1].value for one in series)) for replica in replicas]
