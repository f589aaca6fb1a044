"""Description of a model's weights for routers and replicas, and the replacement of the weights in one replica after
the other.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.every_engine import EngineCall
from wingbeat.deployments.fleet.interface import EngineUnavailable

logger = logging.getLogger(__name__)


class Weights(NamedTuple):
    """Weights that an engine is loaded from; by default the weights that the settings name."""

    digest: str = ""
    """Digest of all bytes of config and weights; empty for the weights that the settings name. Engines with equal
    digests generate the same texts, so one may continue a request of another, and they may share keys and values.
    """
    folder: str = ""
    """Folder of the weights on the machines of the replicas."""
    version: int = 0
    """Unix time of the push in nanoseconds, by the clock of the router that made the push. If weights were pushed
    several times, the weights with the highest version are served.
    """


class WeightsRefused(ValueError):
    """The weights cannot be served; the message gives the reason. The former weights are still served."""


class WeightsConflict(Exception):
    """The weights are not replaced now because of other operations, which the message names."""


class Refusal(NamedTuple):
    """Why a replica keeps its weights."""

    reason: str
    is_of_folder: bool = False
    """Whether the folder is the cause. Trying again is then useless."""


class FleetWeights:
    """A router's operations on the weights of all replicas.

    Args:
        engine_ids: returns the ids of all live replicas.
    """

    def __init__(self, call: EngineCall, engine_ids: Callable[[], frozenset[str]]) -> None:
        self._call, self._engine_ids = call, engine_ids
        self._pushing: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, pool: EnginePool) -> "FleetWeights":
        """Return the operations on all replicas of a pool."""
        return cls(pool.every_engine.call, lambda: pool.engine_ids)

    async def push(self, folder: str, drain_s: float) -> None:
        """Make all replicas serve the weights in a folder. First all replicas inspect the folder; then the replicas
        load the weights one after the other.

        The push continues if the caller is cancelled.

        Args:
            drain_s: seconds that running requests of a replica have to finish.

        Raises:
            WeightsRefused: the weights do not fit, or no engine starts with them.
            WeightsConflict: requests do not finish in time, or another push is running.
            EngineUnavailable: there is no replica, or a replica does not answer.
        """
        if self._pushing is not None and not self._pushing.done():
            raise WeightsConflict("another push of weights is running")
        self._pushing = asyncio.get_running_loop().create_task(self._push(folder, drain_s))
        await asyncio.shield(self._pushing)

    async def described(self) -> dict[str, dict[str, Any] | None]:
        """Return the weights that each replica serves; None for a replica that does not answer."""
        engine_ids = sorted(self._engine_ids())
        cards = (self._call(one, "ask", operation="weights", arguments={}) for one in engine_ids)
        said = await asyncio.gather(*cards, return_exceptions=True)
        return {
            one: None if isinstance(card, BaseException) else card for one, card in zip(engine_ids, said, strict=True)
        }

    async def _push(self, folder: str, drain_s: float) -> None:
        pushed = await self._inspected(folder)
        done: set[str] = set()
        while left := sorted(self._engine_ids() - done):
            refusal = await self._ask(left[0], "take_weights", weights=pushed, drain_s=drain_s)
            if refusal is not None:
                where = (
                    f"; {len(done)} of {len(done) + len(left)} engines have the new weights: push again" if done else ""
                )
                kind = WeightsRefused if refusal.is_of_folder else WeightsConflict
                raise kind(f"{refusal.reason}{where}")
            done.add(left[0])
        if not done:  # all replicas are gone; new replicas will serve the former weights
            raise EngineUnavailable()

    async def _inspected(self, folder: str) -> Weights:
        """Return the weights in a folder, after checking that they are the same on the machines of all replicas, and
        that all replicas accept them.
        """
        engine_ids = sorted(self._engine_ids())
        if not engine_ids:
            raise EngineUnavailable()
        found = await asyncio.gather(*(self._ask(one, "inspect_weights", folder=folder) for one in engine_ids))
        for _, problem in found:
            if problem is not None:
                raise WeightsRefused(problem)
        weights, *others = (weights for weights, _ in found)
        if any(other != weights for other in others):
            raise WeightsRefused("its files differ from machine to machine")
        return weights._replace(version=time.time_ns())

    async def _ask(self, engine_id: str, name: str, **arguments: Any) -> Any:
        try:
            return await self._call(engine_id, "ask", works=True, operation=name, arguments=arguments)
        except Exception as error:
            # For a lost replica the transport may raise any exception, so all are caught. Errors are logged with a
            # traceback, because an error may also come from a fault in Wingbeat's own code.
            logger.warning("Engine %s has not answered %s", engine_id, name, exc_info=error)
            raise EngineUnavailable(f"Engine {engine_id} was lost before it answered: push again.") from error
