"""Saved prefixes by the names that requests give, as routers and replicas know them."""

import asyncio
from typing import Any

from wingbeat.deployments.fleet.catalog import Catalog
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.every_engine import EveryEngine
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix

PREFIXES = "prefixes"
"""Their kind of names."""


class PrefixRefused(ValueError):
    """An engine cannot keep a prefix; says why, and by which code."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class PrefixExists(ValueError):
    """The name is taken."""


class FleetPrefixes:
    """A router's prefixes, and how they are changed in all engines."""

    def __init__(self, catalog: Catalog[SavedPrefix], engines: EveryEngine) -> None:
        self.catalog = catalog
        self._engines = engines
        self._changing = asyncio.Lock()

    @classmethod
    def of(cls, pool: EnginePool) -> "FleetPrefixes":
        """In all engines of a pool."""
        return cls(pool.names.catalogs[PREFIXES], pool.every_engine)

    async def save(self, prefix: SavedPrefix, replace: bool = False) -> SavedPrefix:
        """Have every engine pin a prefix, then let requests name it and keep it on disk.

        Args:
            prefix: of any version.
            replace: it may take the place of another one of that name.

        Raises:
            PrefixExists: there is one of that name.
            PrefixRefused: an engine cannot keep it.
            EngineUnavailable: there is no engine, or one is gone before it answered.
        """
        async with self._changing:
            if self.catalog.find(prefix.name) is not None and not replace:
                raise PrefixExists(prefix.name)
            version = self.catalog.next_version(prefix.name)
            prefix = prefix._replace(version=version)
            try:
                for refusal in await self._engines.operate("save_prefix", prefix, works=True):
                    if refusal is not None:
                        code, reason = refusal
                        raise PrefixRefused(code=code, reason=reason)
            except BaseException:
                await self._engines.operate_where_possible("drop_prefix", prefix.name, version)
                raise
            self.catalog.put(prefix.name, prefix, version)
            await self._tell()
            return prefix

    async def stored(self, name: str) -> SavedPrefix | None:
        """The prefix that has a name on an engine's disk.

        Raises:
            EngineUnavailable: there is no engine, or one is gone before it answered.
        """
        found = [prefix for prefix in await self._engines.operate("stored_prefix", name) if prefix is not None]
        return max(found, key=lambda prefix: prefix.version, default=None)

    async def delete(self, name: str) -> SavedPrefix | None:
        """Let no further request name a prefix, and every engine let go of it. None where there is none."""
        async with self._changing:
            before = self.catalog.find(name)
            if before is not None:
                self.catalog.put(name, None)
                await self._tell()
            return before

    async def describe(self) -> list[dict[str, Any]]:
        """What each engine has.

        Raises:
            EngineUnavailable: there is no engine, or one is gone before it answered.
        """
        return await self._engines.operate("describe_prefixes")

    async def _tell(self) -> None:
        await self._engines.tell({PREFIXES: self.catalog.changes()})
