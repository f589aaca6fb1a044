"""Gathers the figures of all engines in a router, at most once a second and within a time limit."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from wingbeat.deployments.metrics.client_figures import RouterFigures

logger = logging.getLogger(__name__)
FRESH_S = 1.0
"""Seconds for which figures are reused, so that several scrapers together cause only one call to each engine."""
PATIENCE_S = 2.0
"""Maximum seconds to wait for an engine's answer. An engine answers between two rounds."""
REPORT_EVERY_S = 3.0
"""Seconds between reports of this router to the engines. When another router is scraped, it reads the reports from the
engines.
"""

Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Function (engine id, this router's report) -> the engine's figures; raises the exceptions of the transport."""


@dataclass(frozen=True)
class FleetSnapshot:
    """Figures of one model's engines and of the routers at one moment."""

    model_name: str
    engines: dict[str, dict[str, Any]]
    """Figures by engine id, as returned by `Verifier.stats`."""
    silent: tuple[str, ...] = ()
    """Ids of live engines that did not answer in time."""
    routers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`RouterFigures.router_figures` of each router."""


class FleetFigures:
    """Gets the engines' figures, and reports this router's figures to the engines in the same calls.

    Args:
        engine_ids: returns the ids of the live engines.
        ask: calls an engine.
        own: figures of this router.
        patience_s: seconds after which an engine that has not answered is left out.
        clock: returns seconds.
    """

    def __init__(
        self,
        model_name: str,
        engine_ids: Callable[[], frozenset[str]],
        ask: Ask,
        own: RouterFigures,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model_name = model_name
        self._engine_ids = engine_ids
        self._ask = ask
        self._own = own
        self._patience_s = patience_s
        self._clock = clock
        self._latest: FleetSnapshot | None = None
        self._taken_at = 0.0
        self._asking: asyncio.Task[FleetSnapshot] | None = None

    async def snapshot(self) -> FleetSnapshot:
        """Returns figures that are at most `FRESH_S` seconds old; concurrent callers share one call to each engine."""
        if self._latest is not None and self._clock() - self._taken_at < FRESH_S:
            return self._latest
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._take())
        # The call is shielded, so that a cancelled caller does not cancel the call for other callers.
        return await asyncio.shield(self._asking)

    async def run(self) -> None:
        """Reports this router's figures to the engines every `REPORT_EVERY_S`, forever."""
        while True:
            await self.snapshot()
            await asyncio.sleep(REPORT_EVERY_S)

    async def _take(self) -> FleetSnapshot:
        engine_ids = sorted(self._engine_ids())
        answers = await asyncio.gather(*map(self._ask_one, engine_ids))
        engines = {engine_id: answer for engine_id, answer in zip(engine_ids, answers, strict=True) if answer}
        silent = tuple(engine_id for engine_id in engine_ids if engine_id not in engines)
        self._own.forget_engines(frozenset(engine_ids))
        snapshot = FleetSnapshot(self._model_name, engines, silent, self._routers(engines))
        self._latest, self._taken_at = snapshot, self._clock()
        return snapshot

    async def _ask_one(self, engine_id: str) -> dict[str, Any] | None:
        report = self._own.report(engine_id)
        try:
            async with asyncio.timeout(self._patience_s):
                return await self._ask(engine_id, report)
        except Exception as error:
            # Any exception is caught, because the transport may raise any for an engine that is lost or hangs.
            if self._latest is None or engine_id not in self._latest.silent:
                why = f"no answer within {self._patience_s:g} s" if isinstance(error, TimeoutError) else None
                logger.info("Engine %s returns no metrics: %s", engine_id, why or type(error).__name__)
            return None

    def _routers(self, engines: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Returns the newest report of each router among the reports that the engines hold."""
        newest: dict[str, dict[str, Any]] = {}
        for figures in engines.values():
            for router_id, router in figures.get("routers", {}).items():
                if router["number"] > newest.get(router_id, {"number": -1})["number"]:
                    newest[router_id] = router
        newest[self._own.router_id] = self._own.router_figures()
        return newest
