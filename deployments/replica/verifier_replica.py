"""The verifier as a Serve deployment: a shell around the engine's process, which streams to the routers."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from wingbeat.cluster.autoscaling import ReplicaLoad
from wingbeat.cluster.cores import CoreClaim, claim_core
from wingbeat.cluster.engine_speed import EngineSpeed
from wingbeat.cluster.placement import assigned_devices
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.catalog import NameChanges, Names
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.fleet.wire import EngineReport, WireRequest, encode
from wingbeat.deployments.log import show_log
from wingbeat.deployments.metrics.router_reports import RouterReports
from wingbeat.deployments.parts import first, hooks
from wingbeat.deployments.replica.cluster_memory import ClusterMemory
from wingbeat.deployments.replica.drafters.ray_drafter import RayDrafter
from wingbeat.deployments.replica.engine.engine_messages import EngineStart
from wingbeat.deployments.replica.engine_life import EngineLife
from wingbeat.deployments.replica.live_replica import LiveReplica
from wingbeat.deployments.replica.refused_start import refusals
from wingbeat.deployments.replica.replica_engines import ReplicaEngines

logger = logging.getLogger(__name__)
LEASE_S = 15.0
"""A router that shows no sign of life for this long has died or hangs; its requests are aborted."""
LOOK_S = 0.5
"""Between two looks at what the engine does per second."""


class WrongEngine(RuntimeError):
    """The call was meant for another replica, which is gone."""


class OtherModel(RuntimeError):
    """The caller's requests are for another model, such as that before an update."""


class Verifier(LiveReplica):
    """Engine with its drafter. Every call names the engine it is meant for; see `EngineRequestRouter`.

    The engine's name is the replica's, so it stays when the engine's process is replaced.

    Args:
        drafters: those that all verifiers share, see `bind_drafters` in `wingbeat.deployments.parts`.
        store_key: of `ClusterMemory`.
    """

    async def __init__(
        self, config: AppConfig, drafters: DeploymentHandle | None = None, store_key: str | None = None
    ) -> None:
        show_log()
        self._engine_id = serve.get_replica_context().replica_id.unique_id
        self._names = Names()
        """That requests may give, kept for routers to come."""
        self._seen_at: dict[str, float] = {}
        self._reports = RouterReports()
        self._tasks: list[asyncio.Task] = []
        self._config = config
        address = first("address", config)
        self._channel = config.channel_kind(one_node=address is None) if config.has_channel() else None
        self._core: CoreClaim | None = claim_core() if config.shares_core() and address is None else None
        core = None if self._core is None else self._core.core
        gpus = assigned_devices() if config.num_gpus_per_verifier > 0 else ()
        self._start = EngineStart(config, self._engine_id, core, gpus, address)
        self._drafters = drafters
        made_of = config, ClusterMemory(store_key), self._new_life
        self._loaded: ReplicaEngines = first("replica_engines", *made_of) or ReplicaEngines(*made_of)
        self._engines = self._loaded.engines
        try:
            with refusals():
                await self._loaded.start()
        except BaseException:
            # The process may live on, with the failure's traceback holding all of it.
            await self._end()
            raise
        self._info: ModelInfo = replace(self._engines.life.info, text_identity=config.text_identity())
        self._num_slots = self._info.max_num_seqs or config.most_num_seqs()
        self._speed = EngineSpeed(self._num_slots)
        self._spawn(self._engines.run())
        self._spawn(self._expire_clients())
        self._spawn(self._measure())
        made = (begin(config, lambda: self._engines.client.call("figures")) for begin in hooks("beside_engine"))
        self._beside = [one for one in made if one is not None]
        for task in (task for one in self._beside for task in one.tasks()):
            self._spawn(task)
        for publish in hooks("publish"):
            self._spawn(publish(self._info.model_name, self._engine_id, self.stats))

    async def describe(self) -> ModelInfo:
        """The model that is served here."""
        return self._info

    async def exchange(
        self,
        *,
        engine_id: str,
        client_id: str,
        requests: Sequence[WireRequest] = (),
        withdrawn: Sequence[int] = (),
        aborted: Sequence[int] = (),
    ) -> None:
        """Take a router's requests, give those back that it withdraws and that have not begun to run, and stop others.

        The stream says what is refused and given back. A call of nothing is a sign of life.

        Raises:
            WrongEngine: this is another engine.
            RouterGone: the client has no open stream here.
            EngineFailed: the engine's process has died.
        """
        self._check(engine_id, client_id)
        if requests:
            self._engines.client.submit(client_id, requests)
        if withdrawn:
            self._engines.client.withdraw(client_id, withdrawn)
        if aborted:
            self._engines.client.abort(client_id, aborted)

    async def stream(
        self, *, engine_id: str, client_id: str, text_identity: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Messages for one router, as `encode` makes them, an empty one first.

        The end of the stream, for whatever reason, aborts the router's requests. While a new engine is being started,
        the first message waits for it.

        Args:
            text_identity: `AppConfig.text_identity` of what the router's requests are for; None takes any.

        Raises:
            WrongEngine: this is another engine.
            OtherModel: its text would be another.
            RouterGone: the router showed no sign of life.
            EngineFailed: the engine's process has died.
        """
        self._check(engine_id)
        if text_identity not in (None, self._info.text_identity):
            raise OtherModel(f"{self._info.text_identity} is served here, not {text_identity}")
        client = await self._engines.ready()
        self._check(engine_id, client_id)
        stream = client.connect(client_id)
        stream.tell_names(self._names.changes())
        try:
            yield encode([], EngineReport(weights=client.weights))
            while True:
                yield await stream.take()
        finally:
            self._seen_at.pop(client_id, None)
            client.disconnect(client_id)

    async def stats(self, *, engine_id: str | None = None, report: dict[str, Any] | None = None) -> dict[str, Any]:
        """The engine's figures, the ids of its processes, and what routers reported.

        Args:
            report: `RouterFigures.report` of the router that asks.

        Raises:
            WrongEngine: this is another engine.
            EngineFailed: the engine's process has died.
        """
        if engine_id is not None:
            self._check(engine_id)
        if report is not None:
            self._reports.add(report)
        client = self._engines.client
        life = self._engines.life
        figures, supervisor = await client.call("figures"), life.supervisor
        drafter_pid = 0 if supervisor is None else supervisor.pid
        # A drafter that has not come yet is awaited as a lost one is.
        awaited = supervisor is not None and figures.drafter_state == "none"
        of_parts = {name: figure for one in self._beside for name, figure in one.figures().items()}
        return {
            **figures.stats,
            "engine_id": self._engine_id,
            "num_requests": client.num_requests,
            "drafter_state": "lost" if awaited else figures.drafter_state,
            "self_test": life.self_test,
            "drafter_pid": figures.pid if life.drafter_place == "engine" else drafter_pid,
            "drafter_incarnation": 0 if supervisor is None else supervisor.incarnation,
            "drafter_lacks_room": supervisor is not None and supervisor.lacks_room,
            "pid": os.getpid(),
            "engine_pid": figures.pid,
            "rank_pids": [] if life.ranks is None else life.ranks.pids,
            "num_engine_restarts": self._engines.num_restarts,
            "weights": client.weights,
            "recording": figures.recording,
            **of_parts,
            "clients": self._reports.clients(),
            "routers": self._reports.routers(),
        }

    async def trace(self, *, engine_id: str, seconds: float) -> list[tuple]:
        """What the engine's rounds did in the next seconds, as `TraceEvent`s.

        Raises:
            WrongEngine: this is another engine.
            EngineFailed: the engine's process has died.
        """
        self._check(engine_id)
        client = self._engines.client
        recording = await client.call("start_trace")
        try:
            await asyncio.sleep(seconds)
        finally:
            events = client.call("stop_trace", recording)
        return await events

    async def report(self) -> dict[str, Any]:
        """What is served here and how its drafter did at the start, for people."""
        info, config, life = self._info, self._config, self._engines.life
        return {
            "model": info.model_name,
            "drafter": info.drafter,
            "dtype": config.shown_dtype(info.dtype),
            "device": config.resolved_device(),
            "max_model_len": info.max_model_len,
            "num_kv_tokens": info.num_kv_tokens,
            "channel": self._channel if life is None else life.channel_of(self._channel),
            "drafter_place": None if life is None else life.drafter_place,
            "self_test": None if life is None else life.self_test,
            "forced_acceptance": config.forced_acceptance,
        }

    async def check_integrity(self, *, engine_id: str | None = None) -> None:
        """Prove that the KV blocks add up; meaningful for an idle engine.

        Raises:
            Exception: the engine's own, naming the mismatch.
        """
        if engine_id is not None:
            self._check(engine_id)
        await self._engines.client.call("check_integrity")

    async def operate(self, *, engine_id: str, operation: str, arguments: tuple[Any, ...]) -> Any:
        """Operation of `operations_of`, between two rounds of the engine.

        Raises:
            WrongEngine: this is another engine.
            EngineFailed: the engine's process has died.
        """
        self._check(engine_id)
        return await self._engines.client.call("operate", operation, arguments)

    async def ask(self, *, engine_id: str, operation: str, arguments: Mapping[str, Any]) -> Any:
        """Run an operation of `ReplicaEngines.operations`, which goes on where the router that has called leaves.

        Raises:
            WrongEngine: this is another engine.
        """
        self._check(engine_id)
        return await asyncio.shield(self._spawn(self._loaded.operations()[operation](**arguments)))

    async def tell(self, *, engine_id: str, changes: NameChanges) -> None:
        """Keep what a router says of names, tell the other routers, and have the engine keep what they stand for.

        Raises:
            WrongEngine: this is another engine.
            EngineFailed: the engine's process has died.
        """
        self._check(engine_id)
        changed = self._names.merge(changes)
        client = self._engines.client
        client.tell_names(changed)
        for kind, entries in changed.items():
            await client.call("keep_names", kind, entries)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what an autoscaling policy can read. Serve's own count sees one stream per router."""
        life = self._engines.life
        if life is None:
            return ReplicaLoad(num_slots=self._num_slots)._asdict()
        return life.client.loads.replica_load(
            self._num_slots, self._info.num_kv_tokens, self._speed.tokens_per_s
        )._asdict()

    async def __del__(self) -> None:
        """Serve's hook at the end of the replica."""
        await self._end()

    async def _end(self) -> None:
        """Leave no process, channel or core claim behind; harmless a second time."""
        for task in self._tasks:
            task.cancel()
        await self._engines.stop()
        if self._core is not None:
            self._core.release()

    def _spawn(self, coroutine: Any) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks = [*(one for one in self._tasks if not one.done()), task]
        return task

    def _new_life(self, config: AppConfig, weights: str) -> EngineLife:
        """Another engine, by settings that differ from those of the replica in their weights alone."""
        launch = first("launch_drafter", config, self._drafters, self._channel)
        if config.has_own_drafter():
            launch = partial(RayDrafter, config, self._start.core)
        start = self._start._replace(config=config, log_level=self.log_level, weights=weights)
        is_first = not self._engines.num_restarts
        return EngineLife(start, launch, first("launch_ranks", config), self._names, is_first)

    def _check(self, engine_id: str, client_id: str | None = None) -> None:
        if engine_id != self._engine_id:
            raise WrongEngine(f"engine {engine_id} is gone; this is {self._engine_id}")
        if client_id is not None:
            self._seen_at[client_id] = time.monotonic()

    async def _measure(self) -> None:
        """Learn what the engine does per second while it has enough to do."""
        while True:
            await asyncio.sleep(LOOK_S)
            if (life := self._engines.life) is not None:
                loads = life.client.loads
                self._speed.look(loads.num_passed, loads.num_requests, time.monotonic())

    async def _expire_clients(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 5)
            now = time.monotonic()
            for client_id in [client for client, seen in self._seen_at.items() if now - seen > LEASE_S]:
                logger.warning(
                    "Router connection %s has been silent for %.0f s: aborting its requests", client_id, LEASE_S
                )
                self._seen_at.pop(client_id, None)
                if (life := self._engines.life) is not None:
                    life.client.disconnect(client_id)
