"""The verifier as a Serve deployment: hosts the engine, supervises its drafter, and streams to the routers."""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, is_dataclass
from typing import Any

import ray
import torch
from ray import serve

from wingbeat.cluster.autoscaling import LOAD_METRIC
from wingbeat.cluster.channels.cuda_ipc import CudaIpcChannel
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.cluster.cores import CoreClaim, claim_core, pin_thread
from wingbeat.cluster.placement import Share, claim_devices, drafter_options
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.fleet.wire import WireOutput, WireRequest
from wingbeat.deployments.log import show_log
from wingbeat.deployments.metrics.exposition import SnapshotCollector
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.deployments.metrics.ray_export import EXPORT_EVERY_S, RayExport
from wingbeat.deployments.metrics.router_reports import RouterReports
from wingbeat.deployments.replica.build import EngineSetup, build_setup, create_channel, load_factory
from wingbeat.deployments.replica.drafter_actor import DrafterActor
from wingbeat.deployments.replica.engine_loop import EngineFailed, EngineLoop, ServedEngine
from wingbeat.deployments.replica.live_recording import TrafficCapture, start_capture
from wingbeat.deployments.replica.supervisor import DrafterStartError, DrafterSupervisor, root_cause
from wingbeat.runtime.checks.self_test import SelfTest
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.grammar.trial import GrammarTrial
from wingbeat.runtime.heads.contract import HeadConvention

logger = logging.getLogger(__name__)
SWITCH_INTERVAL_S = 0.5e-3
"""How long the event loop may keep the interpreter from the engine's thread; Python's default of 5 ms is a third of a
round."""
LEASE_S = 15.0
"""A router that shows no sign of life for this long has died or hangs; its requests are aborted."""


class WrongEngine(RuntimeError):
    """The call was meant for another replica, which is gone."""


class RayDrafter:
    """One drafter actor in the second bundle of this replica's placement group."""

    def __init__(self, config: AppConfig, core: int | None, convention: HeadConvention | None = None) -> None:
        share = Share(config.num_cpus_per_drafter, config.num_gpus_per_drafter)
        options = drafter_options(share)
        self._actor = ray.remote(DrafterActor).options(max_restarts=0, **options).remote(config, core, convention)
        self.convention = convention
        """How it was told to read its head; its successors are told the same."""

    def needs(self, convention: HeadConvention | None = None) -> DrafterNeeds:
        """What it needs of its verifier; blocks until it is ready.

        Args:
            convention: how it shall read its head; None where its files say that.

        Raises:
            DrafterStartError: it cannot start; names the cause.
        """
        self.convention = convention
        try:
            return ray.get(self._actor.needs.remote(convention))
        except ray.exceptions.RayError as error:
            raise DrafterStartError(f"the drafter cannot start: {root_cause(error)}") from None

    async def pid(self) -> int:
        """Its process id, once it is ready."""
        return await self._actor.pid.remote()

    async def attach(self, channel_name: str, incarnation: int) -> None:
        """Make it serve a channel."""
        await self._actor.attach.remote(channel_name, incarnation)

    def kill(self) -> None:
        """End it without waiting."""
        ray.kill(self._actor, no_restart=True)


def _snapshot(engine: ServedEngine) -> tuple[dict[str, Any], str]:
    """An engine's figures and its drafter's state, copied on the engine's thread: the next round changes them."""
    stats = engine.stats()
    return asdict(stats) if is_dataclass(stats) else stats._asdict(), str(engine.drafter_state)


def _no_needs(convention: HeadConvention | None = None) -> DrafterNeeds:
    """`RayDrafter.needs` where there is no drafter."""
    return DrafterNeeds()


class Verifier:
    """One engine and its drafter. Every call names the engine it is meant for; see `EngineRequestRouter`."""

    async def __init__(self, config: AppConfig) -> None:
        show_log()
        if config.num_gpus_per_verifier > 0:
            claim_devices()
        torch.set_num_threads(config.threads)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._engine_id = serve.get_replica_context().replica_id.unique_id
        self._seen_at: dict[str, float] = {}
        self._reports = RouterReports()
        self._tasks: list[asyncio.Task] = []
        self._loop: EngineLoop | None = None
        self._channel: ShmChannel | CudaIpcChannel | None = None
        self._supervisor: DrafterSupervisor | None = None
        self._capture: TrafficCapture | None = None
        self._first_drafter: RayDrafter | None = None
        self._self_test: dict[str, Any] | None = None
        self._config = config
        self._core: CoreClaim | None = claim_core() if config.shares_core() else None
        try:
            await self._start(config)
        except BaseException:
            # The process may live on, with the failure's traceback holding all of it.
            await self._end()
            raise

    async def _start(self, config: AppConfig) -> None:
        # Launched first: its process starts and loads while this one loads the model.
        drafter = RayDrafter(config, self._core and self._core.core) if config.has_drafter() else None
        self._first_drafter = drafter
        build = load_factory(config.engine_factory) if config.engine_factory else build_setup
        ask_needs = drafter.needs if drafter is not None else _no_needs
        dtype, device = config.resolved_dtype(), config.resolved_device()
        logger.info("loading the model %s (%s on %s)", config.model_name(), dtype, device)
        setup: EngineSetup = await asyncio.to_thread(build, config, ask_needs)
        self._info = setup.info
        grammars = setup.engine.grammars
        trial = None if grammars is None else GrammarTrial(grammars)
        self._loop = EngineLoop(setup.engine, config.stream_interval_ms / 1000, trial)
        self._loop.start()
        if self._core is not None:
            core = self._core.core
            await asyncio.wrap_future(self._loop.call(lambda engine: pin_thread(core)))
        if drafter is not None and setup.channel_spec is not None:
            await self._start_drafter(config, setup, drafter)
        if config.capture_dir is not None:
            # Last, so that nothing of the drafter's self-test is in it.
            capture = self._capture = await asyncio.to_thread(start_capture, config, setup.engine, self._engine_id)
            await asyncio.wrap_future(self._loop.call(lambda engine: engine.observe(capture.rounds)))
        self._spawn(self._expire_clients())
        self._spawn(self._export())

    async def describe(self) -> ModelInfo:
        """The model that is served here."""
        return self._info

    async def submit(self, *, engine_id: str, client_id: str, requests: list[WireRequest]) -> None:
        """Hand requests to the engine; what it refuses is said in the stream.

        Raises:
            WrongEngine: this is another engine.
            RouterGone: the client has no open stream here.
        """
        self._check(engine_id, client_id)
        self._loop.submit(client_id, requests)

    async def abort(self, *, engine_id: str, client_id: str, numbers: list[int]) -> None:
        """Stop requests; with none of them, a sign of life.

        Raises:
            WrongEngine: this is another engine.
        """
        self._check(engine_id, client_id)
        if numbers:
            self._loop.abort(client_id, numbers)

    async def stream(self, *, engine_id: str, client_id: str) -> AsyncGenerator[list[WireOutput], None]:
        """Messages for one router, an empty one first. Its end, for whatever reason, aborts the router's requests.

        Raises:
            WrongEngine: this is another engine.
            RouterGone: the router showed no sign of life.
            EngineFailed: the engine's thread has died.
        """
        self._check(engine_id, client_id)
        outbox = self._loop.connect(client_id)
        try:
            yield []
            while True:
                yield await outbox.take()
        finally:
            self._seen_at.pop(client_id, None)
            self._loop.disconnect(client_id)

    async def stats(self, *, engine_id: str | None = None, report: dict[str, Any] | None = None) -> dict[str, Any]:
        """The engine's figures, the process ids of the pair, and what routers reported.

        Args:
            report: `RouterFigures.report` of the router that asks.
        """
        if engine_id is not None:
            self._check(engine_id)
        if report is not None:
            self._reports.add(report)
        stats, drafter_state = await asyncio.wrap_future(self._loop.call(_snapshot))
        supervisor = self._supervisor
        return {
            **stats,
            "engine_id": self._engine_id,
            "num_requests": self._loop.num_requests,
            "drafter_state": drafter_state,
            "drafter_pid": 0 if supervisor is None else supervisor.pid,
            "drafter_incarnation": 0 if supervisor is None else supervisor.incarnation,
            "pid": os.getpid(),
            "capture": None if self._capture is None else asdict(self._capture.writer.stats),
            "clients": self._reports.clients(),
            "routers": self._reports.routers(),
        }

    async def trace(self, *, engine_id: str, seconds: float) -> list[tuple]:
        """What the engine's rounds did in the next seconds, as `TraceEvent`s.

        Raises:
            WrongEngine: this is another engine.
        """
        self._check(engine_id)
        recording = await asyncio.wrap_future(self._loop.call(lambda engine: engine.clock.record()))
        try:
            await asyncio.sleep(seconds)
        finally:
            self._loop.call(lambda engine: engine.clock.stop(recording))
        return list(map(tuple, recording.events))

    async def report(self) -> dict[str, Any]:
        """What is served here and how its drafter did at the start, for people."""
        info, config = self._info, self._config
        return {
            "model": info.model_name,
            "drafter": info.drafter,
            "dtype": config.resolved_dtype(),
            "device": config.resolved_device(),
            "max_model_len": info.max_model_len,
            "num_kv_tokens": info.num_kv_tokens,
            "self_test": self._self_test,
        }

    async def check_integrity(self, *, engine_id: str | None = None) -> None:
        """Prove that the KV blocks add up; meaningful for an idle engine.

        Raises:
            Exception: the engine's own, naming the mismatch.
        """
        if engine_id is not None:
            self._check(engine_id)
        await asyncio.wrap_future(self._loop.call(lambda engine: engine.check_integrity()))

    async def reset_prefix_cache(self, *, engine_id: str) -> None:
        """Forget the prefixes that are cached.

        Raises:
            WrongEngine: this is another engine.
            EngineFailed: the engine's thread has died.
        """
        self._check(engine_id)
        await asyncio.wrap_future(self._loop.call(lambda engine: engine.reset_prefix_cache()))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what an autoscaling policy can read. Serve's own count sees one stream per router."""
        return {LOAD_METRIC: float(self._loop.num_requests)}

    def check_health(self) -> None:
        """Serve's hook: raises once the engine's thread has died, so that Serve replaces this replica."""
        self._loop.check_alive()

    async def __del__(self) -> None:
        """Serve's hook at the end of the replica."""
        await self._end()

    async def _end(self) -> None:
        """Leave no thread, drafter, channel or core claim behind; harmless a second time."""
        for task in self._tasks:
            task.cancel()
        if self._loop is not None:
            await asyncio.to_thread(self._loop.stop)
        if self._capture is not None:
            await asyncio.to_thread(self._capture.writer.close)
        if self._supervisor is not None:
            self._supervisor.stop()
        elif self._first_drafter is not None:
            self._first_drafter.kill()
            self._first_drafter = None
        if self._channel is not None:
            self._channel.verifier_end.close()
        if self._core is not None:
            self._core.release()

    async def _start_drafter(self, config: AppConfig, setup: EngineSetup, drafter: RayDrafter) -> None:
        name = f"{self._engine_id}.{os.getpid()}"
        self._channel = create_channel(config, name, setup.channel_spec)
        end = self._channel.verifier_end
        convention = drafter.convention
        self._supervisor = DrafterSupervisor(
            self._loop, name, end, lambda: RayDrafter(config, self._core and self._core.core, convention)
        )
        await self._supervisor.start(drafter)
        if setup.check_drafter is not None:
            logger.info("trying the drafter on short texts")
            found = await asyncio.wrap_future(self._loop.call(setup.check_drafter))
            self._self_test = found.as_dict() if isinstance(found, SelfTest) else None
        self._spawn(self._supervisor.run())

    def _spawn(self, coroutine: Any) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(coroutine))

    def _check(self, engine_id: str, client_id: str | None = None) -> None:
        if engine_id != self._engine_id:
            raise WrongEngine(f"engine {engine_id} is gone; this is {self._engine_id}")
        if client_id is not None:
            self._seen_at[client_id] = time.monotonic()

    async def _export(self) -> None:
        """Publish the engine's figures among Ray's metrics until it fails."""
        export = RayExport()
        with contextlib.suppress(EngineFailed):
            while True:
                await asyncio.sleep(EXPORT_EVERY_S)
                snapshot = FleetSnapshot(self._info.model_name, {self._engine_id: await self.stats()})
                await asyncio.to_thread(export.publish, SnapshotCollector(snapshot).collect())

    async def _expire_clients(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 5)
            now = time.monotonic()
            for client_id in [client for client, seen in self._seen_at.items() if now - seen > LEASE_S]:
                logger.warning(
                    "Router connection %s has been silent for %.0f s: aborting its requests", client_id, LEASE_S
                )
                self._seen_at.pop(client_id, None)
                self._loop.disconnect(client_id)
