"""Computes the number of verifier replicas that the load requires, from the replicas' reports alone."""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

TARGET_QUEUE_S = 2.0
DELAYS = {"upscale_delay_s": 5.0, "downscale_delay_s": 300.0}
"""Serve's delays in seconds; Serve's own defaults are 30 and 600. The upscale delay is short because requests wait
meanwhile, but not shorter than the start of a replica. The downscale delay is long because a removed replica takes long
to start again.
"""
SPARE = 0.75
"""Share of an engine's slots. While at least this share of the slots is free, new requests do not queue, so no engine
is added.
"""

WAKING = {"aggregation_function": "min", "look_back_period_s": 2.0, "metrics_interval_s": 1.0}
"""Serve settings for scaling up from 0 replicas. By default Serve starts a replica as soon as the number of waiting
calls, averaged over 30 s, is above 0. With these settings a call must have waited for 2 s, so that a call that arrives
while the last replica ends does not start another replica.
"""


WINDOW_S = 5.0
"""Minimum length in seconds of the window over which the need is averaged, so that gaps between a client's requests do
not count as a change of load.
"""
RECENT_S = 2.0
"""A burst that ended more than this many seconds ago adds no replica, even while the window's mean includes the burst.
"""
STEADY_S = 60.0
"""Time in seconds after which a small change of load counts as lasting. One of several replicas is removed only after
fewer replicas have sufficed for this time, even if Serve's delay is shorter. If the load exceeds the target by less
than `MARGIN` allows, a replica is added only after the mean need has exceeded the target for this time.
"""
MARGIN = 0.8
"""Keeps the number of replicas from alternating when the load is near a whole number of replicas. A replica is removed
only if the load is at most this share of what the remaining replicas can carry. Replicas are added at once only if the
replicas that the load requires exceed the present number of replicas divided by this share.
"""


class ReplicaLoad(NamedTuple):
    """Load report of one replica; the field names are the names of Serve's metrics."""

    num_requests: float = 0.0
    """Requests submitted to the engine and not finished."""
    num_started: float = 0.0
    """Unfinished requests that have begun to write."""
    num_tokens: float = 0.0
    """Prompt tokens still to compute, plus output tokens that the requests are expected to write."""
    kv_share: float = 0.0
    """Share of the KV pool held by started requests."""
    num_slots: float = 1.0
    """Sequences that the engine runs at once."""
    tokens_per_s: float = 0.0
    """Throughput, measured while at least half of the slots are busy; 0 before any measurement."""


def desired_replicas(loads: Iterable[ReplicaLoad], target_queue_s: float) -> float:
    """Number of replicas that finish all present work within `target_queue_s`.

    With this number a new request waits at most `target_queue_s` seconds. The result has two bounds. The upper bound is
    the number of replicas with which the share `SPARE` of all slots is free. The lower bound is the number of replicas
    whose slots and KV pools can hold the running requests.

    Args:
        loads: reports of all running replicas; at least one.
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
"""Pairs of a time in seconds and the value at that time."""


class SteadyNeed:
    """Smooths the momentary need into the number of replicas requested from Serve.

    Serve waits for its delay and then uses only the value that the policy returns at the end of the delay. That moment
    may lie in a gap between two requests. Therefore the returned value covers a window. To scale up, the value is the
    mean need of the latest window. To scale down, the value is the largest mean since the moment at which fewer
    replicas began to suffice.
    """

    def __init__(self) -> None:
        self._forget(0.0)

    def replicas(
        self, need: float, target: int, now: float, upscale_delay_s: float = 0.0, downscale_delay_s: float = 0.0
    ) -> float:
        """Number of replicas to request from Serve; `target` if neither more nor fewer replicas are needed.

        Args:
            need: momentary need from `desired_replicas`.
            target: replicas that run or are starting.
            now: time in seconds.
            upscale_delay_s, downscale_delay_s: Serve's delays.
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
        """The window's mean need if that need justifies more than `target` replicas, else `target`."""
        wanted = min(mean, max(need for at, need in self._needs if at >= now - RECENT_S))
        lasts = now - self._since >= STEADY_S and _mean(self._needs, now - STEADY_S) > target
        return round(wanted, 6) if wanted > target and (lasts or MARGIN * wanted > target) else target

    def _forget(self, now: float) -> None:
        self._since = now
        """Time of the first known need; the load before that time is unknown."""
        self._needs, self._means = Points(), Points()
        """Momentary needs of the last `STEADY_S` seconds, or of the window if the window is longer; and the mean needs
        over the time for which fewer replicas must suffice before fewer are requested (`STEADY_S` less Serve's
        downscale delay).
        """
        self._target, self._peak = -1, 0.0
        """Number of replicas that ran or were starting when fewer replicas began to suffice, or -1 while all replicas
        are needed; and the largest mean need since then.
        """


def _keep(points: Points, value: float, now: float, window_s: float) -> None:
    """Append a value and drop values older than the window."""
    points.append((now, value))
    while points[0][0] < now - window_s:
        points.popleft()


def _mean(points: Points, since: float) -> float:
    values = [value for at, value in points if at >= since]
    return sum(values) / len(values)


class TokenLoadPolicy:
    """Serve autoscaling policy based on `desired_replicas`; Serve applies bounds, delays and smoothing to its result.

    Serve's own policy counts calls, but for Serve the whole traffic of a router is a single call that never ends.
    """

    def __init__(self, target_queue_s: float = TARGET_QUEUE_S) -> None:
        self._target_queue_s = target_queue_s
        self._steady = SteadyNeed()

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Returns the desired number of replicas, which Serve rounds up, and an empty state.

        The state is empty, because this object holds the state itself, and Serve keeps the object until the policy's
        settings change.

        Args:
            context: `ray.serve.config.AutoscalingContext` of the Verifier deployment.
        """
        loads, target = replica_loads(context.raw_metrics or {}), context.target_num_replicas
        if not loads:
            # A replica that is still starting sends no reports, and missing reports must not change the number of
            # replicas.
            return target, {}
        need = desired_replicas(loads, self._target_queue_s)
        now = getattr(context, "current_time", None) or time.time()
        # Serve's type allows a context without `current_time` and `config`.
        config = getattr(context, "config", None)
        delays = (DELAYS[name] if config is None else getattr(config, name) for name in DELAYS)
        return self._steady.replicas(need, target, now, *delays), {}


def replica_loads(metrics: Mapping[str, Mapping[Any, Any]]) -> list[ReplicaLoad]:
    """Latest report of each replica that has reported all fields of `ReplicaLoad`.

    Args:
        metrics: time series of points with a value, oldest first, by metric name and replica.
    """
    series = [metrics.get(name, {}) for name in ReplicaLoad._fields]
    replicas = [replica for replica in series[0] if all(one.get(replica) for one in series)]
    return [ReplicaLoad(*(one[replica][-1].value for one in series)) for replica in replicas]
