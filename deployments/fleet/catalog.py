"""Things that requests name, as routers and replicas know them; the last change of a name counts.

Every router has the whole list, and so has every replica, which keeps it for routers to come: a change is told to all
replicas, and by each of them to its routers.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from wingbeat.deployments.fleet.interface import EngineUnavailable

Thing = TypeVar("Thing")
Answer = TypeVar("Answer")


class CatalogEntry(NamedTuple, Generic[Thing]):
    """What a name stands for; it travels as a plain tuple."""

    name: str
    version: int
    """Nanoseconds since 1970, by the clock of the router that changed it; 0 for what the settings say."""
    thing: Thing | None
    """None for one that is gone."""


class Catalog(Generic[Thing]):
    """Names and what they stand for.

    Args:
        pack, unpack: from a thing to the plain tuple that travels, and back.
    """

    def __init__(self, pack: Callable[[Thing], tuple], unpack: Callable[[tuple], Thing]) -> None:
        self._pack = pack
        self._unpack = unpack
        self._entries: dict[str, CatalogEntry[Thing]] = {}

    @property
    def things(self) -> tuple[Thing, ...]:
        """Those that requests may name."""
        return tuple(entry.thing for entry in self._entries.values() if entry.thing is not None)

    def find(self, name: str) -> Thing | None:
        """What a name stands for; None where that is nothing."""
        entry = self._entries.get(name)
        return None if entry is None else entry.thing

    def next_version(self, name: str) -> int:
        """Of a change that is made now."""
        before = self._entries.get(name)
        return max(time.time_ns(), 0 if before is None else before.version + 1)

    def put(self, name: str, thing: Thing | None, version: int | None = None) -> None:
        """Let a name stand for something from now on, or for nothing.

        Args:
            version: of `next_version`; None takes the next one.
        """
        self._entries[name] = CatalogEntry(name, self.next_version(name) if version is None else version, thing)

    def merge(self, entries: Iterable[tuple]) -> bool:
        """Take over what is newer; returns whether anything was."""
        changed = False
        for name, version, fields in entries:
            before = self._entries.get(name)
            if before is None or before.version < version:
                self._entries[name] = CatalogEntry(name, version, None if fields is None else self._unpack(fields))
                changed = True
        return changed

    def changes(self) -> tuple[tuple, ...]:
        """What differs from the settings, to be merged elsewhere."""
        return tuple(
            (entry.name, entry.version, None if entry.thing is None else self._pack(entry.thing))
            for entry in self._entries.values()
            if entry.version
        )


class FleetNames(Generic[Thing]):
    """A router's catalog, and how its changes reach all engines.

    Args:
        tell: tells one replica what `Catalog.changes` says.
        engine_ids: of the engines that take requests.
    """

    def __init__(
        self,
        catalog: Catalog[Thing],
        tell: Callable[[str, tuple[tuple, ...]], Awaitable[None]],
        engine_ids: Callable[[], list[str]],
    ) -> None:
        self.catalog = catalog
        self._tell = tell
        self._engine_ids = engine_ids
        self._changing = asyncio.Lock()
        self._sharing: list[asyncio.Future] = []

    def share(self, engine_id: str) -> None:
        """Tell a replica that has come what it may not know; one that is gone again needs nothing."""
        if changes := self.catalog.changes():
            self._sharing.append(asyncio.gather(self._tell(engine_id, changes), return_exceptions=True))
            self._sharing = [task for task in self._sharing if not task.done()]

    async def _ask_all(self, ask: Callable[[str], Awaitable[Answer]]) -> list[Answer]:
        """Every engine's answer.

        Raises:
            EngineUnavailable: there is no engine, or one is gone before it answered.
        """
        calls = [ask(engine_id) for engine_id in self._engine_ids()]
        if not calls:
            raise EngineUnavailable()
        try:
            return await asyncio.gather(*calls)
        except Exception as error:
            # Whatever the transport raises for an engine that is gone.
            raise EngineUnavailable("An engine was lost before it answered.") from error

    async def _ask_some(self, *asks: Callable[[str], Awaitable[Any]]) -> None:
        """Ask every engine; one that is gone has nothing to answer."""
        calls = [ask(engine_id) for ask in asks for engine_id in self._engine_ids()]
        await asyncio.gather(*calls, return_exceptions=True)

    async def _tell_all(self, *beside: Callable[[str], Awaitable[Any]]) -> None:
        """Tell every replica the catalog, and ask it more; one that is gone is told when it is back."""
        changes = self.catalog.changes()
        await self._ask_some(lambda engine_id: self._tell(engine_id, changes), *beside)
