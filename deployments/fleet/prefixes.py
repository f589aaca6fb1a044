"""Saved prefixes by the names that requests give, as routers and replicas know them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from wingbeat.deployments.fleet.catalog import Catalog, FleetNames
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix


class PrefixRefused(ValueError):
    """An engine cannot keep a prefix; says why, and by which code."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class PrefixExists(ValueError):
    """The name is taken."""


class PrefixCatalog(Catalog[SavedPrefix]):
    """Names and their prefixes."""

    def __init__(self) -> None:
        super().__init__(SavedPrefix.fields, SavedPrefix.of_fields)


class PrefixTransport(Protocol):
    """Calls to engines by id, as `wingbeat.deployments.fleet.connection.EngineTransport`."""

    async def save_prefix(self, engine_id: str, fields: tuple) -> tuple[str, str] | None:
        """Pin a prefix; None, or code and reason where it cannot be."""
        ...

    async def drop_prefix(self, engine_id: str, name: str, version: int) -> None:
        """Let go of one that was pinned and is not to be kept."""
        ...

    async def stored_prefix(self, engine_id: str, name: str) -> tuple | None:
        """Fields of the prefix that has this name on disk."""
        ...

    async def describe_prefixes(self, engine_id: str) -> dict[str, Any]:
        """`wingbeat.runtime.prefixes.prefix_keeper.PrefixKeeper.describe`."""
        ...

    async def tell_prefixes(self, engine_id: str, entries: tuple[tuple, ...]) -> None:
        """What `Catalog.changes` says; returns once what is pinned is written."""
        ...


class FleetPrefixes(FleetNames[SavedPrefix]):
    """A router's prefixes, and how they are changed in all engines.

    Args:
        engine_ids: of those that take requests.
    """

    def __init__(self, transport: PrefixTransport, engine_ids: Callable[[], list[str]]) -> None:
        super().__init__(PrefixCatalog(), transport.tell_prefixes, engine_ids)
        self._transport = transport

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
                answers = await self._ask_all(partial(self._transport.save_prefix, fields=prefix.fields()))
                for refusal in answers:
                    if refusal is not None:
                        raise PrefixRefused(*refusal)
            except BaseException:
                drop = partial(self._transport.drop_prefix, name=prefix.name, version=version)
                await self._ask_some(drop)
                raise
            self.catalog.put(prefix.name, prefix, version)
            await self._tell_all()
            return prefix

    async def stored(self, name: str) -> SavedPrefix | None:
        """The prefix that has a name on an engine's disk.

        Raises:
            EngineUnavailable: there is no engine, or one is gone before it answered.
        """
        answers = await self._ask_all(partial(self._transport.stored_prefix, name=name))
        found = [SavedPrefix.of_fields(fields) for fields in answers if fields is not None]
        return max(found, key=lambda prefix: prefix.version, default=None)

    async def delete(self, name: str) -> SavedPrefix | None:
        """Let no further request name a prefix, and every engine let go of it. None where there is none."""
        async with self._changing:
            before = self.catalog.find(name)
            if before is not None:
                self.catalog.put(name, None)
                await self._tell_all()
            return before

    async def describe(self) -> list[dict[str, Any]]:
        """What each engine has.

        Raises:
            EngineUnavailable: there is no engine, or one is gone before it answered.
        """
        return await self._ask_all(self._transport.describe_prefixes)
