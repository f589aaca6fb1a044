"""The Serve application: `serve run wingbeat.deployments.app:build key=value`."""

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Mapping
from typing import Any

import ray
from fastapi import FastAPI
from pydantic import ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingPolicy, RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from wingbeat.cluster.autoscaling import DELAYS, TARGET_QUEUE_S, WAKING, TokenLoadPolicy
from wingbeat.cluster.placement import ANY_NODES, ONE_NODE, pair_bundles
from wingbeat.deployments.api.access import is_loopback
from wingbeat.deployments.api.by_handle import HandleCalls
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.guard import HttpLimits
from wingbeat.deployments.api.media_prompts import media_reader
from wingbeat.deployments.api.routes import create_app
from wingbeat.deployments.app_config import CPUS_OF_ROUTER, AppConfig
from wingbeat.deployments.door import DoorKey
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.serve_engines import ServeEngines
from wingbeat.deployments.gpu_shares import shares_here, shares_in_cluster
from wingbeat.deployments.http_server import HttpServer
from wingbeat.deployments.log import show_log
from wingbeat.deployments.metrics.client_figures import RouterFigures
from wingbeat.deployments.metrics.fleet_figures import FleetFigures
from wingbeat.deployments.metrics.monitor import Monitor
from wingbeat.deployments.metrics.tracing import RequestTracer, exporting_provider
from wingbeat.deployments.options.problems import SettingsError, first_problem
from wingbeat.deployments.options.surface_options import OF_REQUESTS
from wingbeat.deployments.replica.drafters.drafter_pool import DrafterPool
from wingbeat.deployments.replica.verifier_replica import Verifier
from wingbeat.deployments.surface import access_of, media_limits_of, parsers_of
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.torchless import keep_torch_out
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile

logger = logging.getLogger(__name__)
ENGINE_ROUTER = "wingbeat.deployments.fleet.replica_router.EngineRequestRouter"
UNLIMITED = 100_000
"""A verifier holds one stream per router and short calls; its load is bounded by the pools' admission, not by Serve."""
SERVE_ENV = {
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""One event loop per replica: in the others each message costs two thread switches, which the engine's thread pays for
with the interpreter lock. Serve's own bundle of such switches (RAY_SERVE_THROUGHPUT_OPTIMIZED) also opens a port per
replica and drains it for 30 s at the end."""
SCALING_ENV = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}
"""Serve's controller hears of the load every second, and not every 6 to 10."""
ROUTER, VERIFIER, DRAFTER_POOL = "Router", "Verifier", "DrafterPool"
END_S = 5.0
"""What a replica has to end itself, beyond the time of its requests."""
HEALTH_CHECK_PERIOD_S = 1.0
"""How long Serve may take to see that a replica's process is gone, and to start another one."""
CONNECT_S, CONNECT_POLL_S = 2.0, 0.01
"""How long a router that listens itself may wait for a connection to an engine before it answers that it has none."""
HEAD_NODE, HEAD_SHARE = "node:__internal_head__", 0.001
"""Ray's own resource of that node, and so little of it that it never runs out."""
START_ATTEMPTS = 2
"""One more than none covers a process lost by chance; a checkpoint that does not load never will."""


class Router(HandleCalls):
    """The HTTP surface: one engine pool and the FastAPI application over it; other deployments call it by handles."""

    async def __init__(self, config: AppConfig, engines: DeploymentHandle, door: DoorKey | None = None) -> None:
        """`door`: where it is to listen itself, beside whatever Serve's proxy passes on."""
        show_log()
        self._config = config
        self._reporting: asyncio.Task[None] | None = None
        self._bound_host = await bound_host() if door is None else door.host
        warn_if_open(config, self._bound_host)
        folder = config.model_dir(with_weights=False)
        if not ConfigFile.read(folder).has_media:
            keep_torch_out()
        self._tokenizer = Tokenizer.load(folder, config.own_template())
        self._parsers = parsers_of(config, self._tokenizer.chat_template)
        described = self._parsers.describe()
        logger.info("%s.", described[:1].upper() + described[1:])
        source = ServeEngines(engines, config.text_identity())
        self._pool = EnginePool(
            source,
            max_num_seqs=config.most_num_seqs(),
            max_queued_requests=config.max_queued_requests,
            engine_wait_s=config.engine_wait_s,
            may_sleep=config.may_sleep(),
            grace_s=config.shutdown_timeout_s,
        )
        await self._pool.start()
        self._monitor = self._new_monitor(source)
        self._service, self._refuses_unknown_fields = self._new_service(), config.unknown_fields == "refuse"
        self._reporting = asyncio.get_running_loop().create_task(self._monitor.fleet.run())
        self._server = None if door is None else await self._listen(door)
        # What is there now stays: a full collection while a large body is read would look at all of it again.
        gc.collect()
        gc.freeze()

    def _new_monitor(self, source: ServeEngines) -> Monitor:
        config, pool, tracer = self._config, self._pool, None
        own = RouterFigures(serve.get_replica_context().replica_id.unique_id, lambda: pool.num_admitted)

        def stats(engine_id: str, report: dict[str, Any]) -> Awaitable[dict[str, Any]]:
            return source.call(engine_id, "stats", report=report)

        def trace(engine_id: str, seconds: float) -> Awaitable[list[tuple]]:
            return source.call(engine_id, "trace", seconds=seconds)

        fleet = FleetFigures(config.model_name(), lambda: pool.engine_ids, stats, own)
        if config.otlp_traces_endpoint is not None:
            tracer = RequestTracer(exporting_provider(config.otlp_traces_endpoint, config.model_name()))
        return Monitor(own, fleet, lambda: pool.engine_ids, trace, tracer, config.access_log)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests by 503; return when none runs. Those that still do at the timeout are ended."""
        await self._pool.drain(timeout_s)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook, called once after the constructor."""
        # Serve's proxy writes X-Request-Id on every answer, and gives every request one that has none.
        return self._application(adds_request_id=False)

    async def _listen(self, door: DoorKey) -> HttpServer:
        bound = await asyncio.to_thread(door.take)
        # Those who wait at the door would be told that there is no engine.
        deadline = time.monotonic() + CONNECT_S
        while not self._pool.healthy() and time.monotonic() < deadline:
            await asyncio.sleep(CONNECT_POLL_S)
        server = HttpServer(self._application(adds_request_id=True), bound, self._config.max_ongoing_requests)
        await server.start()
        return server

    def _new_service(self) -> CompletionService:
        config = self._config
        media = media_reader(
            self._pool.info.takes, config.model_dir(with_weights=False), media_limits_of(config), self._tokenizer
        )
        return CompletionService(
            self._pool,
            self._tokenizer,
            self._parsers,
            self._monitor.own,
            media,
            config.max_answer_bytes,
            takes_templates=config.chat_template == OF_REQUESTS,
        )

    def _application(self, adds_request_id: bool) -> FastAPI:
        config = self._config
        limits = HttpLimits(max_body_bytes=config.max_body_bytes, refuses_unknown_fields=self._refuses_unknown_fields)
        return create_app(
            self._service,
            access_of(config, self._bound_host),
            limits,
            adds_request_id=adds_request_id,
            monitor=self._monitor,
            marks=config.answer_marks(),
            updates_adapters=config.lora_update_dir is not None,
        )

    async def __del__(self) -> None:
        """Serve's hook at the end of the replica: lets the verifiers drain at once."""
        if self._reporting is None:  # it has not started; Serve has the reason
            return
        self._reporting.cancel()
        if self._server is not None:
            # What outlasts its time ends by an error, and then with its connection.
            timeout_s = self._config.shutdown_timeout_s
            await asyncio.gather(self._pool.drain(timeout_s), self._server.close(timeout_s + END_S / 2))
        await self._pool.close()
        if self._monitor.tracer is not None:
            await asyncio.to_thread(self._monitor.tracer.close)


async def bound_host() -> str | None:
    """The address that Serve's proxy listens on, whoever started it.

    Serve's controller knows it; its public interface tells it to no replica.
    """
    client = await asyncio.to_thread(_get_global_client)
    return client.http_config.host


def warn_if_open(config: AppConfig, bound_host: str | None) -> None:
    """Log that other machines may use the server without a key, where they may."""
    if not config.api_key and not is_loopback(bound_host):
        logger.warning("The server listens on %s without an api_key: whoever reaches it may use it.", bound_host)


def build(args: AppConfig | Mapping[str, Any]) -> Application:
    """The application for settings; starts nothing.

    Shares of GPUs that are left open are settled here: by Ray's count where this process is connected to a cluster, as
    it is below `serve run` and `serve deploy`, else by this machine's.

    Raises:
        SettingsError: a setting is unknown or wrong, or needs more GPUs than there are; one line that names it.
    """
    return build_placed(args if isinstance(args, AppConfig) else _settings(args))


def build_placed(config: AppConfig, accelerator_type: str | None = None) -> Application:
    """`build` of settings that are read; `accelerator_type` as `build_at`; raises as `build`."""
    placed = shares_in_cluster(config) if ray.is_initialized() else shares_here(config)
    if placed.line is not None:
        logger.info("%s", placed.line)
    return build_at(placed.config, None, accelerator_type)


def build_at(config: AppConfig, door: DoorKey | None, accelerator_type: str | None = None) -> Application:
    """The application whose only router listens at a door on the node of Ray's head; None: wherever Serve does.

    Args:
        accelerator_type: Ray's name of the GPUs that verifiers are placed on; None: any.

    Raises:
        SettingsError: a parser of the user's own is none.
    """
    try:
        parsers_of(config, None)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    pool = _drafter_pool().bind(config) if config.shares_drafters() else None
    return _router(config, door is not None).bind(config, _verifier(config, accelerator_type).bind(config, pool), door)


def _settings(given: Mapping[str, Any]) -> AppConfig:
    try:
        return AppConfig(**given)
    except ValidationError as error:
        raise SettingsError(first_problem(error, AppConfig)) from None


def __getattr__(name: str) -> Application:
    """`app`: the demo pair's application, for tools that take an application and no function, such as `serve build`."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build({})


def _verifier(config: AppConfig, accelerator_type: str | None = None) -> serve.Deployment:
    verifier = config.verifier_share()
    drafter = config.drafter_share() if config.has_own_drafter() else None
    return serve.deployment(
        Verifier,
        name=VERIFIER,
        ray_actor_options={
            **verifier.actor_options(),
            "runtime_env": {"env_vars": SERVE_ENV | SCALING_ENV | verifier.env_vars() | config.environment()},
        },
        placement_group_bundles=pair_bundles(verifier, drafter, config.tensor_parallel_size, accelerator_type),
        placement_group_strategy=ANY_NODES if config.may_span_nodes() else ONE_NODE,
        max_ongoing_requests=UNLIMITED,
        max_constructor_retry_count=START_ATTEMPTS,
        logging_config=LoggingConfig(enable_access_log=False),
        request_router_config=RequestRouterConfig(request_router_class=ENGINE_ROUTER),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=config.shutdown_timeout_s + END_S,
        **_scaling(config.num_replicas, _with_load_policy(config)),
    )


def _drafter_pool() -> serve.Deployment:
    return serve.deployment(
        DrafterPool,
        name=DRAFTER_POOL,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": SERVE_ENV}},
        max_ongoing_requests=UNLIMITED,
        max_constructor_retry_count=START_ATTEMPTS,
        logging_config=LoggingConfig(enable_access_log=False),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_wait_loop_s=0.5,
        num_replicas=1,
    )


def _router(config: AppConfig, at_head: bool) -> serve.Deployment:
    return serve.deployment(
        serve.ingress()(Router),
        name=ROUTER,
        ray_actor_options={
            "num_cpus": CPUS_OF_ROUTER,
            "resources": {HEAD_NODE: HEAD_SHARE} if at_head else {},
            "runtime_env": {"env_vars": SERVE_ENV | SCALING_ENV},
        },
        max_ongoing_requests=config.max_ongoing_requests,
        logging_config=LoggingConfig(enable_access_log=False),
        max_constructor_retry_count=START_ATTEMPTS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=config.shutdown_timeout_s + END_S,
        max_surge_percent=100,
        **_scaling(config.num_router_replicas, config.router_autoscaling_config),
    )


def _with_load_policy(config: AppConfig) -> dict[str, Any] | None:
    scaling = config.autoscaling_config
    given = {} if scaling is None else scaling.get("policy") or {}
    if scaling is None or "policy_function" in given:
        return scaling
    kwargs = {"target_queue_s": TARGET_QUEUE_S} | given.get("policy_kwargs", {})
    policy = AutoscalingPolicy(policy_function=TokenLoadPolicy, policy_kwargs=kwargs)
    return {**DELAYS, **WAKING, **scaling, "policy": policy}


def _scaling(num_replicas: int | None, autoscaling_config: dict[str, Any] | None) -> dict[str, Any]:
    if autoscaling_config is not None:
        return {"autoscaling_config": autoscaling_config}
    return {"num_replicas": num_replicas or 1}
