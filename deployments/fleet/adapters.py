"""LoRA adapters by the names that requests give, as routers and replicas know them; the last change of a name counts.

Every router has the whole list, and so has every replica, which keeps it for routers to come: a change is told to all
replicas, and by each of them to its routers. Requests carry what an engine needs to read their adapter.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from wingbeat.deployments.fleet.interface import EngineUnavailable
from wingbeat.runtime.lora.resident import AdapterName


class CatalogEntry(NamedTuple):
    """What a name stands for; it travels as a plain tuple."""

    name: str
    version: int
    """Nanoseconds since 1970, by the clock of the router that changed it; 0 for what the settings say."""
    adapter: AdapterName | None
    """None for one that was unloaded."""


class AdapterRefused(ValueError):
    """An adapter cannot be loaded; says why."""


class AdapterExists(ValueError):
    """The name is taken."""


class AdapterCatalog:
    """Names and their adapters."""

    def __init__(self, adapters: Iterable[AdapterName] = ()) -> None:
        self._entries: dict[str, CatalogEntry] = {}
        self.merge(CatalogEntry(adapter.name, 0, adapter) for adapter in adapters)

    @property
    def adapters(self) -> tuple[AdapterName, ...]:
        """Those that requests may name."""
        return tuple(entry.adapter for entry in self._entries.values() if entry.adapter is not None)

    def find(self, name: str) -> AdapterName | None:
        """The adapter of a name; None where there is none."""
        entry = self._entries.get(name)
        return None if entry is None else entry.adapter

    def put(self, name: str, adapter: AdapterName | None) -> None:
        """Let a name stand for an adapter from now on, or for none."""
        before = self._entries.get(name)
        version = max(time.time_ns(), 0 if before is None else before.version + 1)
        self._entries[name] = CatalogEntry(name, version, adapter)

    def merge(self, entries: Iterable[tuple]) -> bool:
        """Take over what is newer; returns whether anything was."""
        changed = False
        for name, version, fields in entries:
            before = self._entries.get(name)
            if before is None or before.version < version:
                self._entries[name] = CatalogEntry(name, version, None if fields is None else AdapterName(*fields))
                changed = True
        return changed

    def changes(self) -> tuple[tuple, ...]:
        """What differs from the settings, to be merged elsewhere."""
        return tuple(
            (entry.name, entry.version, None if entry.adapter is None else tuple(entry.adapter))
            for entry in self._entries.values()
            if entry.version
        )


class AdapterTransport(Protocol):
    """Calls to engines by id, as `wingbeat.deployments.fleet.connection.EngineTransport`."""

    async def load_adapter(self, engine_id: str, name: str, path: str) -> tuple[tuple | None, str]:
        """Fields of the adapter, or None and why it is not served."""
        ...

    async def unload_adapter(self, engine_id: str, digest: str) -> None:
        """Free its place once nobody runs with it."""
        ...

    async def tell_adapters(self, engine_id: str, entries: tuple[tuple, ...]) -> None:
        """What `AdapterCatalog.changes` says."""
        ...


class FleetAdapters:
    """A router's catalog, and how it is changed in all engines.

    Args:
        engine_ids: of those that take requests.
    """

    def __init__(self, transport: AdapterTransport, engine_ids: Callable[[], list[str]]) -> None:
        self.catalog = AdapterCatalog()
        self._transport = transport
        self._engine_ids = engine_ids
        self._changing = asyncio.Lock()
        self._sharing: list[asyncio.Future] = []

    async def load(self, name: str, path: str, in_place: bool = False) -> AdapterName:
        """Have every engine read and check an adapter, then let requests name it.

        Args:
            in_place: it may take the place of another one of that name.

        Raises:
            AdapterExists: there is one of that name.
            AdapterRefused: an engine cannot serve it.
            EngineUnavailable: there is no engine, or one is gone before it answered.
        """
        async with self._changing:
            before = self.catalog.find(name)
            if before is not None and not in_place:
                raise AdapterExists(name)
            calls = [self._transport.load_adapter(engine_id, name, path) for engine_id in self._engine_ids()]
            if not calls:
                raise EngineUnavailable()
            try:
                answers = await asyncio.gather(*calls)
            except Exception as error:
                # Whatever the transport raises for an engine that is gone.
                raise EngineUnavailable("An engine was lost before it answered.") from error
            for fields, problem in answers:
                if fields is None:
                    raise AdapterRefused(problem)
            adapter, *others = (AdapterName(*fields) for fields, _ in answers)
            if any(other != adapter for other in others):
                raise AdapterRefused("its files differ from engine to engine")
            await self._change(name, adapter, before)
            return adapter

    async def unload(self, name: str) -> AdapterName | None:
        """Let no further request name an adapter; those that do go on. None where there is none of that name."""
        async with self._changing:
            before = self.catalog.find(name)
            if before is not None:
                await self._change(name, None, before)
            return before

    def share(self, engine_id: str) -> None:
        """Tell a replica that has come what it may not know; one that is gone again needs nothing."""
        if changes := self.catalog.changes():
            telling = self._transport.tell_adapters(engine_id, changes)
            self._sharing.append(asyncio.gather(telling, return_exceptions=True))
            self._sharing = [task for task in self._sharing if not task.done()]

    async def _change(self, name: str, adapter: AdapterName | None, before: AdapterName | None) -> None:
        self.catalog.put(name, adapter)
        changes = self.catalog.changes()
        held = {one.digest for one in self.catalog.adapters}
        calls = [self._transport.tell_adapters(engine_id, changes) for engine_id in self._engine_ids()]
        if before is not None and before.digest not in held:
            calls += [self._transport.unload_adapter(engine_id, before.digest) for engine_id in self._engine_ids()]
        # One that is gone holds nothing, and is told when it is back.
        await asyncio.gather(*calls, return_exceptions=True)
