"""Rolls back a version of the draft head if its drafts are accepted less often than the drafts of the version before
it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from wingbeat.deployments.replica.engine.engine_calls import EngineFigures
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.runtime.learning.head_counts import Accepted, CountedSince, HeadCounts, fell_below
from wingbeat.runtime.learning.head_versions import HeadLedger, learner_figures
from wingbeat.runtime.learning.ledger import Ledger, LedgerError

logger = logging.getLogger(__name__)
LOOK_S = 1.0
SHOWN = ("promoted", "rejected", "rolled_back", "refused")
JUDGED_ROUNDS = 20_000
"""Number of rounds after which a version is no longer judged, because later differences come more from the texts than
from the head.
"""


class HeadJudge:
    """Judge of head versions, one for each engine. The first judge of a fleet that finds a version worse than the
    version before rolls it back for all engines.

    The counts of all engines are added up in the ledger's folder, so that no counts are lost when an engine restarts.

    Args:
        figures: returns the engine's figures.
    """

    def __init__(self, ledger: HeadLedger, figures: Callable[[], Awaitable[EngineFigures]]) -> None:
        self._ledger, self._figures = ledger, figures
        self._counts, self._since = HeadCounts(ledger.folder), CountedSince()
        self._unreadable = False
        self.said: dict[str, Any] = {"decisions": {}, "learner": None}
        """Figures for metrics: the counts of decisions by kind, and the figures that the learner reports."""

    def _read(self) -> tuple[Ledger, dict[str, Any] | None]:
        return self._ledger.read(), learner_figures(self._ledger.folder)

    async def run(self) -> None:
        """Judge the served version every `LOOK_S` seconds, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(EngineFailed):
                await self.look()

    async def look(self) -> None:
        """Judge the served version; does nothing if there is no version before it."""
        try:
            ledger, learner = await asyncio.to_thread(self._read)
        except LedgerError as error:
            if not self._unreadable:
                logger.error("%s", error)
            self._unreadable = True
            return
        self._unreadable = False
        self.said = {"decisions": {what: ledger.counts.get(what, 0) for what in SHOWN}, "learner": learner}
        figures = await self._figures()
        more = self._since.since_last_call(figures.pid, figures.stats["by_head"])
        try:
            counted = await asyncio.to_thread(self._counts.add, more, ledger, figures.weights)
        except OSError as error:  # for example a full disk, or a lock that is held for long; the new counts are lost
            logger.error("acceptance counts of the head's versions cannot be stored: %s", error)
            return
        if ledger.previous is None:
            return
        new, old = (counted.get(number, Accepted()) for number in (ledger.served, ledger.previous))
        if new.rounds > JUDGED_ROUNDS:
            return
        why = fell_below(new, old)
        if why is None:
            return
        if await asyncio.to_thread(self._ledger.roll_back, f"measured: {why}", ledger.served) is not None:
            logger.warning("version %d of the head is rolled back: %s", ledger.served, why)
