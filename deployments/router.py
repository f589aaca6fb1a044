"""The router: a Serve deployment with the HTTP surface of one model or several."""

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

from wingbeat.deployments.api.access import is_loopback
from wingbeat.deployments.api.guard import HttpLimits
from wingbeat.deployments.api.routes import create_app
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.door import DoorKey
from wingbeat.deployments.http_server import HttpServer
from wingbeat.deployments.log import set_log_level, show_log
from wingbeat.deployments.metrics.monitor import Monitor
from wingbeat.deployments.model_front import ModelFront
from wingbeat.deployments.options.live_options import LiveOptions
from wingbeat.deployments.parts import hooks
from wingbeat.deployments.replica.refused_start import refusals
from wingbeat.deployments.surface import access_of
from wingbeat.runtime.torchless import keep_torch_out

logger = logging.getLogger(__name__)
END_S = 5.0
"""What a replica has to end itself, beyond the time of its requests."""
CONNECT_S, CONNECT_POLL_S = 2.0, 0.01
"""How long a router that listens itself may wait for a connection to an engine before it answers that it has none."""


RouterBase: Any = type("RouterBase", hooks("router_base"), {})


class Router(RouterBase):
    """The HTTP surface: an engine pool per model and the FastAPI application over them."""

    async def __init__(
        self, config: AppConfig, engines: Sequence[DeploymentHandle], door: DoorKey | None = None
    ) -> None:
        """`engines`: by model of `config.served()`. `door`: where it is to listen itself, beside whatever Serve's proxy
        passes on."""
        show_log()
        self._config, self._is_up = config, False
        self._reporting: list[asyncio.Task[None]] = []
        self._bound_host = await bound_host() if door is None else door.host
        warn_if_open(config, self._bound_host)
        router_id = serve.get_replica_context().replica_id.unique_id
        pairs = list(zip(config.served(), engines, strict=True))
        self._fronts = [ModelFront(own, handle, router_id) for own, handle in pairs]
        self._followers = [follower(self._fronts) for follower in hooks("follow_live")]
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
        # What is there now stays: a full collection while a large body is read would look at all of it again.
        gc.collect()
        gc.freeze()

    def _new_monitor(self) -> Monitor:
        config, fronts = self._config, self._fronts
        watchers = [watcher for made in hooks("request_watcher") if (watcher := made(config)) is not None]

        # Answers are the router's, and counted once.
        fleets = [front.figures for front in fronts]
        return Monitor(fronts[0].own, fleets, watchers, config.access_log)

    async def reconfigure(self, user_config: Any) -> None:
        """Serve's hook: takes over what can change while it runs, in a running replica and after a start.

        A replica that runs and is told something wrong says so in its log, and goes on as it was: Serve would stop one
        that raises, and start others, which raise too.

        Raises:
            ValueError: at a start, it is none; one line that names the field.
        """
        try:
            live = LiveOptions.of(user_config)
            for follower in self._followers:
                await follower.take(live)
            for front in self._fronts:
                front.take(live)
        except ValueError as error:
            if not self._is_up:
                raise
            logger.error("%s. This replica goes on as it was.", error)
            return
        for service in self._models:
            service.speculates = live.speculation
        set_log_level(live.log_level)

    def check_health(self) -> None:
        """Serve's hook, called once the replica has started and from then on: a router is well that answers."""
        self._is_up = True

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests by 503; return when none runs. Those that still do at the timeout are ended."""
        await asyncio.gather(*(front.pool.drain(timeout_s) for front in self._fronts))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook, called once after the constructor."""
        # Serve's proxy writes X-Request-Id on every answer, and gives every request one that has none.
        return self._application(adds_request_id=False)

    async def _listen(self, door: DoorKey) -> HttpServer:
        bound = await asyncio.to_thread(door.take)
        # Those who wait at the door would be told that there is no engine.
        deadline = time.monotonic() + CONNECT_S
        while not all(front.pool.healthy() for front in self._fronts) and time.monotonic() < deadline:
            await asyncio.sleep(CONNECT_POLL_S)
        server = HttpServer(self._application(adds_request_id=True), bound, self._config.max_ongoing_requests)
        await server.start()
        return server

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
        """Serve's hook at the end of the replica: lets the verifiers drain at once."""
        if not self._reporting:  # it has not started; Serve has the reason
            return
        for task in self._reporting:
            task.cancel()
        if self._server is not None:
            # What outlasts its time ends by an error, and then with its connection.
            timeout_s = self._config.shutdown_timeout_s
            await asyncio.gather(self.drain(timeout_s), self._server.close(timeout_s + END_S / 2))
        await asyncio.gather(*(front.pool.close() for front in self._fronts))
        for watcher in self._monitor.watchers:
            await asyncio.to_thread(watcher.close)


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
