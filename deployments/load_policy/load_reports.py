"""Load reports of a replica for the autoscaling policy."""

import asyncio
import time
from functools import cached_property

from wingbeat.cluster.autoscaling import ReplicaLoad
from wingbeat.cluster.engine_speed import EngineSpeed
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.replica.engine_supervisor import EngineSupervisor
from wingbeat.deployments.replica.router_streams import ClientLoads

LOOK_S = 0.5
"""Seconds between two samples of the engine's throughput."""


class LoadReports:
    """Base class of a verifier that reports its load."""

    _engines: EngineSupervisor
    _info: ModelInfo
    _num_slots: int

    @cached_property
    def speed(self) -> EngineSpeed:
        """Measured throughput of the engine."""
        return EngineSpeed(self._num_slots)

    def look(self) -> None:
        """Add a sample of the engine's throughput."""
        if (life := self._engines.life) is not None:
            loads = life.client.loads
            self.speed.look(loads.num_passed, loads.num_requests, time.monotonic())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: returns load figures for autoscaling policies.

        Serve's own figure would be useless, because it counts one call (the stream) per router.
        """
        if (life := self._engines.life) is None:
            return ReplicaLoad(num_slots=self._num_slots)._asdict()
        loads, tokens_per_s = life.client.loads, self.speed.tokens_per_s
        return replica_load(loads, self._num_slots, self._info.num_kv_tokens, tokens_per_s)._asdict()


async def measure_speed(verifier: LoadReports) -> None:
    """Measure the throughput of the verifier's engine, for ever, while the engine has enough work."""
    while True:
        await asyncio.sleep(LOOK_S)
        verifier.look()


def replica_load(loads: ClientLoads, num_slots: int, num_kv_tokens: int, tokens_per_s: float) -> ReplicaLoad:
    """Return load figures for an autoscaling policy.

    Args:
        num_slots: maximum sequences that the engine runs at once.
        num_kv_tokens: tokens that the KV pool holds; 0 if unknown.
        tokens_per_s: measured throughput of the engine.
    """
    started = [request for request in loads.open.values() if request.num_written]
    num_tokens = sum(load.num_tokens for load in loads.by_client().values())
    num_held = sum(request.num_prompt + request.num_done + request.num_written for request in started)
    kv_share = num_held / num_kv_tokens if num_kv_tokens else 0.0
    return ReplicaLoad(loads.num_requests, len(started), num_tokens, kv_share, num_slots, tokens_per_s)
