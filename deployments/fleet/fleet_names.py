"""Names of one kind in a router, and how they are changed in all engines."""

from typing import Generic

from wingbeat.deployments.fleet.catalog import Catalog, Thing
from wingbeat.deployments.fleet.engine_pool import EnginePool


class FleetNames(Generic[Thing]):
    """Names of one kind; a change of one waits for those before it."""

    kind: str
    """See `catalog.KINDS`."""

    def __init__(self, pool: EnginePool) -> None:
        self.catalog: Catalog[Thing] = pool.names.catalogs[self.kind]
        self._engines = pool.every_engine

    async def delete(self, name: str) -> Thing | None:
        """Let no further request name a thing; requests that do go on. None where there is none of that name."""
        async with self.catalog.changing:
            before = self.catalog.find(name)
            if before is not None:
                await self._put(name, None)
            return before

    async def _put(self, name: str, thing: Thing | None, version: int | None = None) -> None:
        """`Catalog.put` in every engine."""
        self.catalog.put(name, thing, version)
        await self._engines.tell({self.kind: self.catalog.changes()})
