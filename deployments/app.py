"""The Serve application: `serve run wingbeat.deployments.app:build key=value`."""

import logging
import re
import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from pydantic import ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from wingbeat.cluster.placement import ANY_NODES, ONE_NODE, pair_bundles
from wingbeat.deployments.app_config import CPUS_OF_ROUTER, AppConfig
from wingbeat.deployments.log import level_environment
from wingbeat.deployments.options.problems import SettingsError, first_problem
from wingbeat.deployments.parts import first_result, hooks
from wingbeat.deployments.ray_cluster import PROXY_ENV
from wingbeat.deployments.replica.verifier_replica import Verifier
from wingbeat.deployments.router import END_S, Router

logger = logging.getLogger(__name__)
ENGINE_ROUTER = "wingbeat.deployments.fleet.replica_router.EngineRequestRouter"
UNLIMITED = 100_000
"""Maximum ongoing calls per verifier; the calls are one stream for each router, and short calls. The number is so high
that Serve never limits the calls, because the routers' admission already limits the load.
"""
SERVE_ENV = {
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    **PROXY_ENV,
}
"""Environment that makes a replica use a single event loop. With Serve's separate loops, each message would cost two
thread switches, and the engine's thread would wait for the interpreter lock meanwhile. Serve's variable
RAY_SERVE_THROUGHPUT_OPTIMIZED, which sets such options together, is not used, because it also opens a port for each
replica, and drains this port for 30 s at the end.
"""
SCALING_ENV = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}
"""Environment that makes Serve report load to its controller every second instead of every 6 to 10 s."""
ROUTER, VERIFIER = "Router", "Verifier"
HEALTH_CHECK_PERIOD_S = 1.0
"""Seconds between Serve's health checks. After at most this time, Serve notices that a replica is dead, and replaces
it.
"""
HEAD_NODE, HEAD_SHARE = "node:__internal_head__", 0.001
"""HEAD_NODE: name of the resource that only the cluster's head node has. HEAD_SHARE: amount of this resource that a
router reserves; the amount is so small that the resource never runs out.
"""
START_ATTEMPTS = 2
"""Maximum attempts to construct a replica. One retry is enough if a process was lost by chance; if a checkpoint is
broken, each attempt fails.
"""


def build(args: AppConfig | Mapping[str, Any]) -> Application:
    """Builds the Serve application for settings; starts nothing.

    GPU shares that the settings leave open are chosen here. If this process is connected to a Ray cluster, as under
    `serve run` and `serve deploy`, they are chosen for the GPUs of the cluster, else for the GPUs of this machine.

    Raises:
        SettingsError: a setting is unknown or invalid, or needs more GPUs than there are; the message is one line that
            names the setting.
    """
    return build_placed(args if isinstance(args, AppConfig) else _settings(args))


def build_placed(config: AppConfig, accelerator_types: Sequence[str | None] = ()) -> Application:
    """Does the same as `build` for validated settings; `accelerator_types` is passed to `build_at`."""
    for take_gpus in hooks("take_gpus"):
        config = take_gpus(config, ray.is_initialized(), lambda line: logger.info("%s", line))
    return build_at(config, None, accelerator_types)


def build_at(config: AppConfig, door: Any, accelerator_types: Sequence[str | None] = ()) -> Application:
    """Builds the application.

    With the key of a `door`, see the hook `open_door`, there is one router, on the head node, which listens there. With
    None, routers get requests from Serve's proxy.

    Args:
        accelerator_types: for each model, Ray's name of the GPU type for its verifiers; None stands for any type.
    """
    served = config.served()
    kinds = accelerator_types or [None] * len(served)
    engines = [_engines(one, _mark(one, config), kind) for one, kind in zip(served, kinds, strict=True)]
    return _router(config, door is not None).bind(config, engines, door)


def _engines(config: AppConfig, mark: str, accelerator_type: str | None) -> Application:
    pool = first_result("bind_drafters", config, mark)
    # Serve's controller keeps `store_key` and passes it to all replicas of this build. The replicas of another build
    # have another key, so they do not use weights that were pushed to this build.
    store_key = uuid.uuid4().hex
    return _verifier(config, accelerator_type, VERIFIER + mark).bind(config, pool, store_key)


def verifier_names(config: AppConfig) -> list[str]:
    """Returns the name of each model's deployment of verifiers."""
    return [VERIFIER + _mark(one, config) for one in config.served()]


def _mark(one: AppConfig, config: AppConfig) -> str:
    """Returns the suffix of the names of a model's deployments, which contains only characters that are safe in file
    names; empty if there is a single model.
    """
    if one is config:
        return ""
    name = one.model_name()
    plain = re.sub(r"[^A-Za-z0-9.-]", "-", name)
    return f"_{plain}" if plain == name else f"_{plain}_{zlib.crc32(name.encode()):08x}"


def _settings(given: Mapping[str, Any]) -> AppConfig:
    try:
        return AppConfig(**given)
    except ValidationError as error:
        raise SettingsError(first_problem(error, AppConfig)) from None


def __getattr__(name: str) -> Application:
    """Builds the demo pair's application when a tool that takes no function, such as `serve build`, reads the name
    `app`.
    """
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build({})


def _verifier(config: AppConfig, accelerator_type: str | None = None, name: str = VERIFIER) -> serve.Deployment:
    verifier = config.verifier_share()
    drafter = config.drafter_share() if config.has_own_drafter() else None
    scaling = config.autoscaling_config
    if scaling is not None:
        scaling = first_result("scaling_config", scaling) or scaling
    return serve.deployment(
        Verifier,
        name=name,
        ray_actor_options={
            **verifier.actor_options(),
            "runtime_env": {"env_vars": SERVE_ENV | SCALING_ENV | verifier.env_vars() | _environment(config)},
        },
        placement_group_bundles=pair_bundles(verifier, drafter, config.num_ranks(), accelerator_type),
        placement_group_strategy=ANY_NODES if config.may_span_nodes() else ONE_NODE,
        max_ongoing_requests=UNLIMITED,
        max_constructor_retry_count=START_ATTEMPTS,
        logging_config=LoggingConfig(enable_access_log=False),
        request_router_config=RequestRouterConfig(request_router_class=ENGINE_ROUTER),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=config.shutdown_timeout_s + END_S,
        **_scaling(config.num_replicas, scaling),
    )


def _router(config: AppConfig, at_head: bool) -> serve.Deployment:
    return serve.deployment(
        serve.ingress()(Router),
        name=ROUTER,
        ray_actor_options={
            "num_cpus": CPUS_OF_ROUTER,
            "resources": {HEAD_NODE: HEAD_SHARE} if at_head else {},
            # Routers read and check the models' settings again, so routers need the same environment variables as the
            # models.
            "runtime_env": {"env_vars": SERVE_ENV | SCALING_ENV | _environment(config)},
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


def _environment(config: AppConfig) -> dict[str, str]:
    own = {name: value for one in config.served() for name, value in one.environment().items()}
    return own | level_environment()


def _scaling(num_replicas: int | None, autoscaling_config: dict[str, Any] | None) -> dict[str, Any]:
    if autoscaling_config is not None:
        return {"autoscaling_config": autoscaling_config}
    return {"num_replicas": num_replicas or 1}
