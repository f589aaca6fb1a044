"""Saved prefixes by name, in routers and replicas."""

from typing import Any

from wingbeat.deployments.fleet.fleet_names import FleetNames
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix

PREFIXES = "prefixes"
"""Kind of names of saved prefixes."""


class PrefixRefused(ValueError):
    """An engine cannot keep a prefix. The exception holds an error code and the reason."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class PrefixExists(ValueError):
    """The name already belongs to another prefix."""


class FleetPrefixes(FleetNames[SavedPrefix]):
    """A router's prefixes, and operations that change them in all engines."""

    kind = PREFIXES

    async def save(self, prefix: SavedPrefix, replace: bool = False) -> SavedPrefix:
        """Make every engine pin a prefix, then let requests use the prefix, and keep it on disk.

        Args:
            prefix: the prefix to save; its version is replaced by a new version.
            replace: whether an existing prefix of that name may be replaced.

        Raises:
            PrefixExists: another prefix has the name, and `replace` is False.
            PrefixRefused: an engine cannot keep the prefix.
            EngineUnavailable: there is no engine, or an engine ended before it answered.
        """
        async with self.catalog.changing:
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
            await self._put(prefix.name, prefix, version)
            return prefix

    async def stored(self, name: str) -> SavedPrefix | None:
        """Return the newest prefix with this name on any engine's disk; None if no engine has such a prefix.

        Raises:
            EngineUnavailable: there is no engine, or an engine ended before it answered.
        """
        found = [prefix for prefix in await self._engines.operate("stored_prefix", name) if prefix is not None]
        return max(found, key=lambda prefix: prefix.version, default=None)

    async def describe(self) -> list[dict[str, Any]]:
        """Return the pinned prefixes of each engine.

        Raises:
            EngineUnavailable: there is no engine, or an engine ended before it answered.
        """
        return await self._engines.operate("describe_prefixes")
