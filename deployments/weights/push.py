"""The weights of a model as routers and replicas know them, and how others take their place, replica by replica."""

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
    """What an engine is loaded from; by default what the settings name."""

    digest: str = ""
    """Of config and weights, every byte: texts go on, and keys and values are read, where it is the same."""
    folder: str = ""
    """On the machines of the replicas."""
    version: int = 0
    """Nanoseconds since 1970, by the clock of the router that pushed them; of two pushes the later one counts."""


class WeightsRefused(ValueError):
    """They cannot be served; says why. Those before are."""


class WeightsConflict(Exception):
    """They are not served now, for what else goes on; says what."""


class Refusal(NamedTuple):
    """Why a replica goes on with the weights that it has."""

    reason: str
    is_of_folder: bool = False
    """Whether trying again will not help."""


class FleetWeights:
    """A router's way to the weights of all replicas.

    Args:
        engine_ids: of all replicas that are live.
    """

    def __init__(self, call: EngineCall, engine_ids: Callable[[], frozenset[str]]) -> None:
        self._call, self._engine_ids = call, engine_ids
        self._pushing: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, pool: EnginePool) -> "FleetWeights":
        """To all replicas of a pool."""
        return cls(pool.every_engine.call, lambda: pool.engine_ids)

    async def push(self, folder: str, drain_s: float) -> None:
        """Have every replica serve the weights in a folder: all of them look at it, then one after another takes it.

        Whoever leaves meanwhile does not stop it.

        Args:
            drain_s: what the requests that run in a replica have to end.

        Raises:
            WeightsRefused: they do not fit, or no engine starts with them.
            WeightsConflict: requests do not end in time, or another push is under way.
            EngineUnavailable: there is no replica, or one does not answer.
        """
        if self._pushing is not None and not self._pushing.done():
            raise WeightsConflict("other weights are being pushed")
        self._pushing = asyncio.get_running_loop().create_task(self._push(folder, drain_s))
        await asyncio.shield(self._pushing)

    async def described(self) -> dict[str, dict[str, Any] | None]:
        """What each replica serves; None where it does not say."""
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
        if not done:  # all are gone; those that come serve what they served
            raise EngineUnavailable()

    async def _inspected(self, folder: str) -> Weights:
        """The weights in a folder, which all replicas find alike and can serve."""
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
            # Whatever the transport raises for a replica that is gone; a mistake of ours is in the log.
            logger.warning("Engine %s has not answered %s", engine_id, name, exc_info=error)
            raise EngineUnavailable(f"Engine {engine_id} was lost before it answered: push again.") from error
