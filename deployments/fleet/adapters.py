"""LoRA adapters by the names that requests give, as routers and replicas know them.

Requests carry what an engine needs to read their adapter.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from wingbeat.deployments.fleet.catalog import Catalog, FleetNames
from wingbeat.runtime.lora.resident import AdapterName

MOST_NAME_CHARS = 256


class AdapterRefused(ValueError):
    """An adapter cannot be loaded; says why."""


class AdapterExists(ValueError):
    """The name is taken."""


class AdapterCatalog(Catalog[AdapterName]):
    """Names and their adapters."""

    def __init__(self) -> None:
        super().__init__(tuple, lambda fields: AdapterName(*fields))


class AdapterTransport(Protocol):
    """Calls to engines by id, as `wingbeat.deployments.fleet.connection.EngineTransport`."""

    async def load_adapter(self, engine_id: str, name: str, path: str) -> tuple[tuple | None, str]:
        """Fields of the adapter, or None and why it is not served."""
        ...

    async def unload_adapter(self, engine_id: str, digest: str) -> None:
        """Free its place once nobody runs with it."""
        ...

    async def tell_adapters(self, engine_id: str, entries: tuple[tuple, ...]) -> None:
        """What `Catalog.changes` says."""
        ...


class FleetAdapters(FleetNames[AdapterName]):
    """A router's adapters, and how they are changed in all engines.

    Args:
        engine_ids: of those that take requests.
    """

    catalog: AdapterCatalog

    def __init__(self, transport: AdapterTransport, engine_ids: Callable[[], list[str]]) -> None:
        super().__init__(AdapterCatalog(), transport.tell_adapters, engine_ids)
        self._transport = transport

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
            answers = await self._ask_all(partial(self._transport.load_adapter, name=name, path=path))
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

    async def _change(self, name: str, adapter: AdapterName | None, before: AdapterName | None) -> None:
        self.catalog.put(name, adapter)
        held = {one.digest for one in self.catalog.things}
        goes = before is not None and before.digest not in held
        await self._tell_all(*[partial(self._transport.unload_adapter, digest=before.digest)] if goes else [])


def name_problem(name: str) -> str | None:
    """Why an adapter cannot have a name; None where it can."""
    if not 0 < len(name) <= MOST_NAME_CHARS or not name.isprintable() or name != name.strip():
        return f"must have 1 to {MOST_NAME_CHARS} printable characters, no space at its ends"
    return None
