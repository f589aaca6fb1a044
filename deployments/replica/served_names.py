"""A replica's part in what requests name: adapters and saved prefixes, kept for routers to come."""

from abc import ABC, abstractmethod
from typing import Any

from wingbeat.deployments.fleet.adapters import AdapterCatalog
from wingbeat.deployments.fleet.prefixes import PrefixCatalog
from wingbeat.deployments.replica.engine_supervisor import EngineSupervisor
from wingbeat.deployments.replica.router_stream import RouterStream


class ServedNames(ABC):
    """Calls of routers, as they are named in `wingbeat.deployments.fleet`.

    Each raises WrongEngine where this is another engine than the one that is meant, and EngineFailed where the engine's
    process has died.
    """

    _engines: EngineSupervisor

    def __init__(self) -> None:
        self._adapters = AdapterCatalog()
        self._prefixes = PrefixCatalog()

    async def load_adapter(self, *, engine_id: str, name: str, path: str) -> tuple[tuple | None, str]:
        """Have the engine read and check an adapter: its fields, or None and why it is not served."""
        self._check(engine_id)
        return await self._engines.client.call("load_adapter", name, path)

    async def unload_adapter(self, *, engine_id: str, digest: str) -> None:
        """Free an adapter's place once nobody runs with it."""
        self._check(engine_id)
        await self._engines.client.call("unload_adapter", digest)

    async def tell_adapters(self, *, engine_id: str, entries: tuple[tuple, ...]) -> None:
        """Keep what a router says of adapters, and tell the other routers."""
        self._check(engine_id)
        if self._adapters.merge(entries):
            self._engines.client.tell_adapters(self._adapters.changes())

    async def save_prefix(self, *, engine_id: str, fields: tuple) -> tuple[str, str] | None:
        """Have the engine pin a prefix: None, or code and reason where it cannot be."""
        self._check(engine_id)
        return await self._engines.client.call("save_prefix", fields)

    async def drop_prefix(self, *, engine_id: str, name: str, version: int) -> None:
        """Have it let go of one that is not to be kept."""
        self._check(engine_id)
        await self._engines.client.call("drop_prefix", name, version)

    async def stored_prefix(self, *, engine_id: str, name: str) -> tuple | None:
        """Fields of the prefix that has this name on the engine's disk."""
        self._check(engine_id)
        return await self._engines.client.call("stored_prefix", name)

    async def describe_prefixes(self, *, engine_id: str) -> dict[str, Any]:
        """The prefixes that the engine has pinned."""
        self._check(engine_id)
        return await self._engines.client.call("describe_prefixes")

    async def tell_prefixes(self, *, engine_id: str, entries: tuple[tuple, ...]) -> None:
        """Keep what a router says of prefixes, tell the other routers, and have the engine pin and write the same."""
        self._check(engine_id)
        if self._prefixes.merge(entries):
            client, changes = self._engines.client, self._prefixes.changes()
            client.tell_prefixes(changes)
            await client.call("keep_prefixes", changes)

    @abstractmethod
    def _check(self, engine_id: str, client_id: str | None = None) -> None:
        """Raises WrongEngine; a call is a sign of life of the client that it names."""

    def _tell_names(self, stream: RouterStream) -> None:
        """Tell a router that comes."""
        if adapters := self._adapters.changes():
            stream.tell_adapters(adapters)
        if prefixes := self._prefixes.changes():
            stream.tell_prefixes(prefixes)
