"""A scripted pool whose engine reads adapters."""

from types import SimpleNamespace
from typing import Any

from tests.deployments.http_world import FakeCaches, FakePool
from wingbeat.deployments.fleet.catalog import VARIANTS
from wingbeat.deployments.lora.fleet import FleetAdapters
from wingbeat.deployments.lora.keeper import AdapterKeeper
from wingbeat.runtime.scheduling.request import Variant

SERVED = {"loads_adapters": True}
"""Part of a service whose operators may load adapters."""


class FakeAdapterFiles(FakeCaches):
    """An engine that can load the adapters `good` and `other`."""

    def __init__(self) -> None:
        super().__init__()
        self.unloaded: list[str] = []
        self._keeper = AdapterKeeper(SimpleNamespace(resident=self), None)

    async def call(self, engine_id: str, name: str, *, works: bool = False, **fields: Any) -> Any:
        if name == "tell":
            self._keeper.keep(fields["changes"][VARIANTS])
        return await super().call(engine_id, name, works=works, **fields)

    def load_adapter(self, name: str, path: str) -> tuple[Variant | None, str]:
        if path not in ("good", "other"):
            return None, f"{path}: it is not there"
        return Variant(name, path, f"digest of {path}"), ""

    def unload(self, digest: str) -> None:
        self.unloaded.append(digest)


class AdapterPool(FakePool):
    """A `FakePool` with such an engine."""

    def __init__(self, *given, **more) -> None:
        super().__init__(*given, **more)
        self.files = FakeAdapterFiles()
        self.every_engine = self.files.engines
        self.adapters = FleetAdapters(self)
