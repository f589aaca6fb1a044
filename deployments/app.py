"""The Serve application: `serve run wingbeat.deployments.app:build key=value`."""

import asyncio
import gc
import logging
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingPolicy, RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from wingbeat.cluster.autoscaling import DELAYS, WAKING, TokenLoadPolicy
from wingbeat.cluster.placement import ANY_NODES, ONE_NODE, pair_bundles
from wingbeat.deployments.api.access import is_loopback
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.guard import HttpLimits
from wingbeat.deployments.api.image_prompts import image_reader
from wingbeat.deployments.api.routes import create_app
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.serve_engines import ServeEngines
from wingbeat.deployments.log import show_log
from wingbeat.deployments.metrics.client_figures import RouterFigures
from wingbeat.deployments.metrics.fleet_figures import FleetFigures
from wingbeat.deployments.metrics.monitor import Monitor
from wingbeat.deployments.metrics.tracing import RequestTracer, exporting_provider
from wingbeat.deployments.replica.drafters.drafter_pool import DrafterPool
from wingbeat.deployments.replica.verifier_replica import Verifier
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
START_ATTEMPTS = 2
"""One more than none covers a process lost by chance; a checkpoint that does not load never will."""


class Router:
    """The HTTP surface: one engine pool and the FastAPI application over it."""

    async def __init__(self, config: AppConfig, engines: DeploymentHandle) -> None:
        show_log()
        self._config = config
        self._bound_host = await bound_host()
        warn_if_open(config, self._bound_host)
        folder = config.model_dir(with_weights=False)
        if not ConfigFile.read(folder).has_vision:
            keep_torch_out()
        self._tokenizer = Tokenizer.load(folder)
        source = ServeEngines(engines, config.text_identity())
        self._pool = EnginePool(
            source,
            max_num_seqs=config.max_num_seqs,
            max_queued_requests=config.max_queued_requests,
            engine_wait_s=config.engine_wait_s,
            may_sleep=config.may_sleep(),
            grace_s=config.shutdown_timeout_s,
        )
        await self._pool.start()
        self._monitor = self._new_monitor(source)
        self._reporting = asyncio.get_running_loop().create_task(self._monitor.fleet.run())
        # What is there now stays: a full collection while a large body is read would look at all of it again.
        gc.collect()
        gc.freeze()

    def _new_monitor(self, source: ServeEngines) -> Monitor:
        config, pool, tracer = self._config, self._pool, None
        own = RouterFigures(serve.get_replica_context().replica_id.unique_id, lambda: pool.num_admitted)
        fleet = FleetFigures(config.model_name(), lambda: pool.engine_ids, source.stats, own)
        if config.otlp_traces_endpoint is not None:
            tracer = RequestTracer(exporting_provider(config.otlp_traces_endpoint, config.model_name()))
        return Monitor(own, fleet, lambda: pool.engine_ids, source.trace, tracer, config.access_log)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests by 503; return when none runs. Those that still do at the timeout are ended."""
        await self._pool.drain(timeout_s)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook, called once after the constructor."""
        config = self._config
        images = image_reader(
            self._pool.info.images, config.model_dir(with_weights=False), config.media_limits(), self._tokenizer
        )
        service = CompletionService(
            self._pool, self._tokenizer, config.parsers(), self._monitor.own, images, config.max_answer_bytes
        )
        limits = HttpLimits(max_body_bytes=config.max_body_bytes)
        # Serve's proxy writes X-Request-Id on every answer, and gives every request one that has none.
        return create_app(
            service,
            config.access(self._bound_host),
            limits,
            adds_request_id=False,
            monitor=self._monitor,
            updates_adapters=config.lora_update_dir is not None,
        )

    async def __del__(self) -> None:
        """Serve's hook at the end of the replica: lets the verifiers drain at once."""
        self._reporting.cancel()
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


def build(args: AppConfig) -> Application:
    """The application for a configuration; starts nothing."""
    pool = _drafter_pool().bind(args) if args.has_drafter() and not args.has_own_drafter() else None
    return _router(args).bind(args, _verifier(args).bind(args, pool))


def _verifier(config: AppConfig) -> serve.Deployment:
    verifier = config.verifier_share()
    drafter = config.drafter_share() if config.has_own_drafter() else None
    return serve.deployment(
        Verifier,
        name=VERIFIER,
        ray_actor_options={
            **verifier.actor_options(),
            "runtime_env": {"env_vars": SERVE_ENV | SCALING_ENV | verifier.env_vars()},
        },
        placement_group_bundles=pair_bundles(verifier, drafter, config.tensor_parallel_size),
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


def _router(config: AppConfig) -> serve.Deployment:
    return serve.deployment(
        serve.ingress()(Router),
        name=ROUTER,
        ray_actor_options={
            "num_cpus": config.num_cpus_per_router,
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
    if scaling is None or "policy" in scaling:
        return scaling
    policy = AutoscalingPolicy(policy_function=TokenLoadPolicy, policy_kwargs={"target_queue_s": config.target_queue_s})
    return {**DELAYS, **WAKING, **scaling, "policy": policy}


def _scaling(num_replicas: int | None, autoscaling_config: dict[str, Any] | None) -> dict[str, Any]:
    if autoscaling_config is not None:
        return {"autoscaling_config": autoscaling_config}
    return {"num_replicas": num_replicas or 1}
