"""LoRA adapters by the names that requests give, as routers and replicas know them.

Requests carry what an engine needs to read their adapter.
"""

import asyncio

from wingbeat.deployments.fleet.catalog import ADAPTERS, Catalog
from wingbeat.deployments.fleet.every_engine import EveryEngine
from wingbeat.runtime.scheduling.request import AdapterName


class AdapterRefused(ValueError):
    """An adapter cannot be loaded; says why."""


class AdapterExists(ValueError):
    """The name is taken."""


class FleetAdapters:
    """A router's adapters, and how they are changed in all engines."""

    def __init__(self, catalog: Catalog[AdapterName], engines: EveryEngine) -> None:
        self.catalog = catalog
        self._engines = engines
        self._changing = asyncio.Lock()

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
            answers = await self._engines.operate("load_adapter", name, path, works=True)
            for loaded, problem in answers:
                if loaded is None:
                    raise AdapterRefused(problem)
            adapter, *others = (loaded for loaded, _ in answers)
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

    async def _change(self, name: str, adapter: AdapterName | None, before: AdapterName | None) -> None:
        self.catalog.put(name, adapter)
        held = {one.digest for one in self.catalog.things}
        await self._engines.tell({ADAPTERS: self.catalog.changes()})
        if before is not None and before.digest not in held:
            await self._engines.operate_where_possible("unload_adapter", before.digest)
