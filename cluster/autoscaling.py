"""How many verifiers the load asks for: a pure function of what the replicas report."""

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


class TokenLoadPolicy:
    """Serve's view of `desired_replicas`: bounds, delays and smoothing are applied by Serve to what this returns.

    Serve's own policy counts calls, and to Serve a router's whole traffic is one endless stream.
    """

    def __init__(self, target_queue_s: float = TARGET_QUEUE_S) -> None:
        self._target_queue_s = target_queue_s

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Desired replicas (Serve rounds up) and an empty state.

        Args:
            context: `ray.serve.config.AutoscalingContext` of the Verifier deployment.
        """
        loads = replica_loads(context.raw_metrics or {})
        if not loads:
            # A replica that is still starting reports nothing: no load seen is no reason to scale.
            return context.target_num_replicas, {}
        return desired_replicas(loads, self._target_queue_s), {}


def replica_loads(metrics: Mapping[str, Mapping[Any, Any]]) -> list[ReplicaLoad]:
    """The latest that each replica has reported, of those that have reported all.

    Args:
        metrics: by name and replica, points of time and value, oldest first.
    """
    series = [metrics.get(name, {}) for name in ReplicaLoad._fields]
    replicas = [replica for replica in series[0] if all(one.get(replica) for one in series)]
    return [ReplicaLoad(*(one[replica][-1].value for one in series)) for replica in replicas]
