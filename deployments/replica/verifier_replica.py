"""The verifier as a Serve deployment: runs the engine in a separate process and streams outputs to routers."""

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

from wingbeat.cluster.cores import CoreClaim, claim_core
from wingbeat.cluster.placement import assigned_devices
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.catalog import NameChanges, Names
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.fleet.wire import EngineReport, WireRequest, encode
from wingbeat.deployments.log import level_at_start, show_log
from wingbeat.deployments.parts import first_result, hooks
from wingbeat.deployments.replica.drafters.ray_drafter import RayDrafter
from wingbeat.deployments.replica.engine.engine_messages import EngineStart
from wingbeat.deployments.replica.engine_life import EngineLife
from wingbeat.deployments.replica.engine_supervisor import EngineSupervisor
from wingbeat.deployments.replica.refused_start import refusals
from wingbeat.deployments.replica.replica_engines import ReplicaEngines

logger = logging.getLogger(__name__)
LEASE_S = 15.0
"""Seconds without a call after which a router counts as dead and its requests are aborted."""


class WrongEngine(RuntimeError):
    """The call is meant for the engine of another replica, and that replica is gone."""


class OtherModel(RuntimeError):
    """The caller's requests are for another model than this replica serves, such as the model before an update."""


VerifierBase: Any = type("VerifierBase", hooks("verifier_base"), {})


class Verifier(VerifierBase):
    """Replica of an engine with its drafter. Each call names the engine for which the call is meant; see
    `EngineRequestRouter`.

    The engine's id is the id of the replica, so the id stays the same when the engine's process is replaced.

    Args:
        drafters: pool of drafters that all verifiers share; None if this verifier has its own drafter. See
            `bind_drafters` in `wingbeat.deployments.parts`.
        store_key: key of values that replicas of this build keep for later replicas; None keeps nothing.
    """

    log_level = level_at_start()
    """Log level of the replica, of its engine, and of engines that replace the engine."""
    _engines: EngineSupervisor
    _is_up = False

    async def __init__(
        self, config: AppConfig, drafters: DeploymentHandle | None = None, store_key: str | None = None
    ) -> None:
        show_log()
        self._engine_id = serve.get_replica_context().replica_id.unique_id
        self._names = Names()
        """Named objects that requests may use, kept for routers that connect later and for engines that start later."""
        self._seen_at: dict[str, float] = {}
        self._reports = first_result("router_reports")
        self._tasks: list[asyncio.Task] = []
        self._config = config
        address = first_result("address", config)
        self._channel = config.channel_kind(one_node=address is None) if config.has_channel() else None
        self._core: CoreClaim | None = claim_core() if config.shares_core() and address is None else None
        core = None if self._core is None else self._core.core
        gpus = assigned_devices() if config.num_gpus_per_verifier > 0 else ()
        self._start = EngineStart(config, self._engine_id, core, gpus, address)
        self._drafters = drafters
        engines: ReplicaEngines | None = first_result("replica_engines", config, store_key, self._new_life)
        self._loaded = engines or ReplicaEngines(config, self._new_life)
        self._engines = self._loaded.engines
        try:
            with refusals():
                await self._loaded.start()
        except BaseException:
            # Everything is released explicitly, because the replica's process may go on running, and the traceback of
            # the failure keeps references to these objects.
            await self._end()
            raise
        self._info: ModelInfo = replace(self._engines.life.info, text_identity=config.text_identity())
        self._num_slots = self._info.max_num_seqs or config.most_num_seqs()
        self._spawn(self._engines.run())
        self._spawn(self._expire_clients())
        for run in hooks("replica_tasks"):
            self._spawn(run(self))
        made = (begin(config, lambda: self._engines.client.call("figures")) for begin in hooks("beside_engine"))
        self._beside = [one for one in made if one is not None]
        for task in (task for one in self._beside for task in one.tasks()):
            self._spawn(task)
        for publish in hooks("publish"):
            self._spawn(publish(self._info.model_name, self._engine_id, self.stats))

    def check_health(self) -> None:
        """Serve's hook: raises once engines have died too often, so that Serve replaces this replica."""
        if self._engines.failure is not None:
            raise self._engines.failure
        self._is_up = True

    async def describe(self) -> ModelInfo:
        """Return a description of the served model."""
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
        """Submit a router's requests, withdraw requests that have not begun to run, and abort others.

        Refused and withdrawn requests are reported in the stream. A call without any requests only shows that the
        router lives.

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
        """Yield messages for one router, as `encode` returns them; the first message is empty.

        When the stream ends, for whatever reason, the router's requests are aborted. While an engine is being replaced,
        the first message is sent only after the new engine has started.

        Args:
            text_identity: `AppConfig.text_identity` that the router's requests require; None accepts any identity.

        Raises:
            WrongEngine: this is another engine.
            OtherModel: the model of this replica may generate other texts.
            RouterGone: the router made no call for `LEASE_S`.
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
        """Return the engine's figures, the ids of its processes, and reports of routers.

        Args:
            report: report of the calling router, see the hook `router_figures`.

        Raises:
            WrongEngine: this is another engine.
            EngineFailed: the engine's process has died.
        """
        if engine_id is not None:
            self._check(engine_id)
        reported = {} if self._reports is None else self._reports.exchange(report)
        client = self._engines.client
        life = self._engines.life
        figures, supervisor = await client.call("figures"), life.supervisor
        drafter_pid = 0 if supervisor is None else supervisor.pid
        # For a drafter that has not attached yet, the engine reports `none`; callers get `lost`.
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
            **reported,
        }

    async def report(self) -> dict[str, Any]:
        """Return facts about the served model and the result of the drafter's self-test, for display to people."""
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
        """Check that the KV block counts are consistent; meaningful only for an idle engine.

        Raises:
            Exception: the engine's error, which names the mismatch.
        """
        if engine_id is not None:
            self._check(engine_id)
        await self._engines.client.call("check_integrity")

    async def operate(self, *, engine_id: str, operation: str, arguments: tuple[Any, ...]) -> Any:
        """Run an operation of `operations_of` between two rounds of the engine.

        Raises:
            WrongEngine: this is another engine.
            EngineFailed: the engine's process has died.
        """
        self._check(engine_id)
        return await self._engines.client.call("operate", operation, arguments)

    async def ask(self, *, engine_id: str, operation: str, arguments: Mapping[str, Any]) -> Any:
        """Run an operation of `ReplicaEngines.operations`, which continues if the calling router disconnects.

        Raises:
            WrongEngine: this is another engine.
        """
        self._check(engine_id)
        return await asyncio.shield(self._spawn(self._loaded.operations()[operation](**arguments)))

    async def tell(self, *, engine_id: str, changes: NameChanges) -> None:
        """Merge a router's changes of names into this replica's names, forward them to the other routers, and apply
        them in the engine.

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

    async def __del__(self) -> None:
        """Serve's hook at the end of the replica: releases everything."""
        await self._end()

    async def _end(self) -> None:
        """Release all processes, channels and the claimed CPU core; a second call does nothing."""
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
        """Create the `EngineLife` of an engine. The settings may differ from the replica's settings only in the
        weights.
        """
        launch = first_result("launch_drafter", config, self._drafters, self._channel)
        if config.has_own_drafter():
            launch = partial(RayDrafter, config, self._start.core)
        start = self._start._replace(config=config, log_level=self.log_level, weights=weights)
        is_first = not self._engines.num_restarts
        return EngineLife(start, launch, first_result("launch_ranks", config), self._names, is_first)

    def _check(self, engine_id: str, client_id: str | None = None) -> None:
        if engine_id != self._engine_id:
            raise WrongEngine(f"engine {engine_id} is gone; this is {self._engine_id}")
        if client_id is not None:
            self._seen_at[client_id] = time.monotonic()

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
