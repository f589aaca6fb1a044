"""The router: a Serve deployment with the HTTP API of one or several models."""

import asyncio
import gc
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle

from wingbeat.deployments.api.access import Access, is_loopback
from wingbeat.deployments.api.guard import HttpLimits
from wingbeat.deployments.api.routes import create_app
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.log import show_log
from wingbeat.deployments.metrics.monitor import Monitor
from wingbeat.deployments.model_front import ModelFront
from wingbeat.deployments.parts import hooks
from wingbeat.deployments.replica.refused_start import refusals
from wingbeat.runtime.torchless import keep_torch_out

logger = logging.getLogger(__name__)
END_S = 5.0
"""Seconds that a replica has for its own shutdown, in addition to the `shutdown_timeout_s` that its requests have."""
CONNECT_S, CONNECT_POLL_S = 2.0, 0.01
"""CONNECT_S: maximum seconds that a router with its own socket waits for its first connections to engines before it
answers requests. CONNECT_POLL_S: seconds between two checks for these connections.
"""


RouterBase: Any = type("RouterBase", hooks("router_base"), {})


class Router(RouterBase):
    """Serve deployment of the HTTP API, with an engine pool per model and a FastAPI application on top of the pools."""

    async def __init__(self, config: AppConfig, engines: Sequence[DeploymentHandle], door: Any = None) -> None:
        """Starts the router; returns when every model has an engine.

        Args:
            engines: handles of the verifiers' deployments, in the order of `config.served()`.
            door: key of a door, see the hook `open_door`, at which the router listens itself; None if requests come
                only from Serve's proxy.
        """
        show_log()
        self._config, self._is_up = config, False
        self._reporting: list[asyncio.Task[None]] = []
        self._bound_host = await bound_host() if door is None else door.host
        warn_if_open(config, self._bound_host)
        router_id = serve.get_replica_context().replica_id.unique_id
        pairs = list(zip(config.served(), engines, strict=True))
        self._fronts = [ModelFront(own, handle, router_id) for own, handle in pairs]
        if not any(front.needs_torch for front in self._fronts):
            keep_torch_out()
        with refusals():
            await asyncio.gather(*(front.start() for front in self._fronts))
        self._monitor = self._new_monitor()
        services = [self._fronts[0].new_service()]
        services += [front.new_service(beside=services[0]) for front in self._fronts[1:]]
        self._models, self._refuses_unknown_fields = ServedModels(*services), config.unknown_fields == "refuse"
        event_loop = asyncio.get_running_loop()
        self._reporting = [event_loop.create_task(front.figures.run()) for front in self._fronts]
        self._server = None if door is None else await self._listen(door)
        # Objects that exist now are excluded from garbage collection, because otherwise all of them could be traversed
        # while a large body is read.
        gc.collect()
        gc.freeze()

    def _new_monitor(self) -> Monitor:
        config, fronts = self._config, self._fronts
        # HTTP answers belong to the router and not to a model, so they are counted only in the figures of the first
        # model.
        watchers = [fronts[0].own, *(made(config) for made in hooks("request_watcher"))]
        fleets = [front.figures for front in fronts]
        return Monitor(fleets, [watcher for watcher in watchers if watcher is not None], config.access_log)

    def check_health(self) -> None:
        """Serve's hook, called periodically after the start. A router that answers the call is healthy."""
        self._is_up = True

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests with 503, and waits until running requests have ended; requests that still run at the
        timeout are ended.
        """
        await asyncio.gather(*(front.pool.drain(timeout_s) for front in self._fronts))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook, called once after the constructor: returns the application for requests from Serve's proxy."""
        # `adds_request_id` is False, because Serve's proxy already adds an X-Request-Id to each request and answer.
        return self._application(adds_request_id=False)

    async def _listen(self, door: Any) -> Any:
        # Without this wait, clients that are already waiting at the socket would get the error that there is no engine.
        deadline = time.monotonic() + CONNECT_S
        while not all(front.pool.healthy() for front in self._fronts) and time.monotonic() < deadline:
            await asyncio.sleep(CONNECT_POLL_S)
        return await door.listen(self._application(adds_request_id=True), self._config.max_ongoing_requests)

    def _application(self, adds_request_id: bool) -> FastAPI:
        config = self._config
        limits = HttpLimits(max_body_bytes=config.max_body_bytes, refuses_unknown_fields=self._refuses_unknown_fields)
        marks = {name: mark for front in self._fronts for name, mark in front.config.answer_marks().items()}
        return create_app(
            self._models,
            access_of(config, self._bound_host),
            limits,
            adds_request_id=adds_request_id,
            monitor=self._monitor,
            marks=marks,
            more_routes=[partial(add_routes, fronts=self._fronts) for add_routes in hooks("add_router_routes")],
        )

    async def __del__(self) -> None:
        """Serve's hook at the end of the replica: ends requests, then closes the connections to the engines."""
        if not self._reporting:  # the constructor has failed; Serve has got its exception
            return
        for task in self._reporting:
            task.cancel()
        if self._server is not None:
            # At the timeout, requests that still run are ended with an error. The server closes their connections only
            # after that, so that clients get the error.
            timeout_s = self._config.shutdown_timeout_s
            await asyncio.gather(self.drain(timeout_s), self._server.close(timeout_s + END_S / 2))
        await asyncio.gather(*(front.pool.close() for front in self._fronts))
        for watcher in self._monitor.watchers:
            await asyncio.to_thread(watcher.close)


async def bound_host() -> str | None:
    """Returns the address on which Serve's proxy listens, even if another process has started Serve.

    The address is requested from Serve's controller, because in a replica no public interface of Serve returns the
    address.
    """
    client = await asyncio.to_thread(_get_global_client)
    return client.http_config.host


def warn_if_open(config: AppConfig, bound_host: str | None) -> None:
    """Logs a warning if clients on other machines can use the server without an API key."""
    if not config.api_key and not is_loopback(bound_host):
        logger.warning(
            "The server listens on %s without an api_key: anyone who can reach the address can use it.", bound_host
        )


def access_of(config: AppConfig, bound_host: str | None) -> Access:
    """Returns the access rules of the HTTP API for a server bound to `bound_host`."""
    return Access.of_server(
        bound_host,
        api_keys=config.api_key,
        operator_keys=config.operator_key,
        allowed_origins=config.allowed_origins,
        allowed_hosts=config.allowed_hosts,
    )
