"""Names of one kind in a router; a change is made in all engines."""

from typing import Generic

from wingbeat.deployments.fleet.catalog import Catalog, Thing
from wingbeat.deployments.fleet.engine_pool import EnginePool


class FleetNames(Generic[Thing]):
    """Names of one kind. Changes are made one after the other."""

    kind: str
    """Kind of the names, see `catalog.KINDS`."""

    def __init__(self, pool: EnginePool) -> None:
        self.catalog: Catalog[Thing] = pool.names.catalogs[self.kind]
        self._engines = pool.every_engine

    async def delete(self, name: str) -> Thing | None:
        """Deletes a name; returns the thing that the name referred to, or None if the name is unknown. Running requests
        are not affected.
        """
        async with self.catalog.changing:
            before = self.catalog.find(name)
            if before is not None:
                await self._put(name, None)
            return before

    async def _put(self, name: str, thing: Thing | None, version: int | None = None) -> None:
        """Does `Catalog.put` in this router's catalog and in every engine."""
        self.catalog.put(name, thing, version)
        await self._engines.tell({self.kind: self.catalog.changes()})
