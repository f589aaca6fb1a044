"""Gathers the figures of all engines in a router, at most once a second and within a time limit."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

logger = logging.getLogger(__name__)
FRESH_S = 1.0
"""Seconds for which figures are reused, so that several scrapers together cause only one call to each engine."""
PATIENCE_S = 2.0
"""Maximum seconds to wait for an engine's answer. An engine answers between two rounds."""
REPORT_EVERY_S = 3.0
"""Seconds between reports of this router to the engines. When another router is scraped, it reads the reports from the
engines.
"""


class OwnFigures(Protocol):
    """Figures of a router, see the hook `router_figures`."""

    def report(self, engine_id: str) -> dict[str, Any]:
        """Returns the router's report for an engine, which passes the report on to other routers."""
        ...

    def routers(self, engines: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Returns figures of all routers, by id, from the figures of engines and this router's own."""
        ...

    def forget_engines(self, live: frozenset[str]) -> None:
        """Removes the figures of engines that no longer exist."""
        ...


Ask = Callable[[str, dict[str, Any] | None], Awaitable[dict[str, Any]]]
"""Function (engine id, this router's report or None) -> the engine's figures; raises the transport's exceptions."""


@dataclass(frozen=True)
class FleetSnapshot:
    """Figures of one model's engines and of the routers at one moment."""

    model_name: str
    engines: dict[str, dict[str, Any]]
    """Figures by engine id, as returned by `Verifier.stats`."""
    silent: tuple[str, ...] = ()
    """Ids of live engines that did not answer in time."""
    routers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Figures of each router, by id; empty if routers have no figures."""


class FleetFigures:
    """Gets the engines' figures, and reports this router's figures to the engines in the same calls.

    Args:
        engine_ids: returns the ids of the live engines.
        ask: calls an engine.
        own: figures of this router; None if routers have no figures.
        patience_s: seconds after which an engine that has not answered is left out.
        clock: returns seconds.
    """

    def __init__(
        self,
        model_name: str,
        engine_ids: Callable[[], frozenset[str]],
        ask: Ask,
        own: OwnFigures | None = None,
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
        """Reports this router's figures to the engines every `REPORT_EVERY_S`, forever; returns if there are none."""
        while self._own is not None:
            await self.snapshot()
            await asyncio.sleep(REPORT_EVERY_S)

    async def _take(self) -> FleetSnapshot:
        engine_ids = sorted(self._engine_ids())
        answers = await asyncio.gather(*map(self._ask_one, engine_ids))
        engines = {engine_id: answer for engine_id, answer in zip(engine_ids, answers, strict=True) if answer}
        silent = tuple(engine_id for engine_id in engine_ids if engine_id not in engines)
        snapshot = FleetSnapshot(self._model_name, engines, silent)
        if self._own is not None:
            self._own.forget_engines(frozenset(engine_ids))
            snapshot = replace(snapshot, routers=self._own.routers(engines))
        self._latest, self._taken_at = snapshot, self._clock()
        return snapshot

    async def _ask_one(self, engine_id: str) -> dict[str, Any] | None:
        report = None if self._own is None else self._own.report(engine_id)
        try:
            async with asyncio.timeout(self._patience_s):
                return await self._ask(engine_id, report)
        except Exception as error:
            # Any exception is caught, because the transport may raise any for an engine that is lost or hangs.
            if self._latest is None or engine_id not in self._latest.silent:
                why = f"no answer within {self._patience_s:g} s" if isinstance(error, TimeoutError) else None
                logger.info("Engine %s returns no metrics: %s", engine_id, why or type(error).__name__)
            return None
