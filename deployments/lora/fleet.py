"""LoRA adapters by the names that requests use, in routers and replicas. Each request contains the data that an engine
needs to find the files of the request's adapter.
"""

from wingbeat.deployments.fleet.catalog import VARIANTS
from wingbeat.deployments.fleet.fleet_names import FleetNames
from wingbeat.runtime.scheduling.request import Variant


class AdapterRefused(ValueError):
    """An adapter cannot be loaded; the message gives the reason."""


class AdapterExists(ValueError):
    """The name already belongs to another adapter."""


class FleetAdapters(FleetNames[Variant]):
    """A router's adapters, and operations that change them in all engines."""

    kind = VARIANTS

    async def load(self, name: str, path: str, in_place: bool = False) -> Variant:
        """Make every engine read and check an adapter, then allow requests to use the adapter.

        Args:
            in_place: whether an existing adapter of that name may be replaced.

        Raises:
            AdapterExists: another adapter has the name, and `in_place` is False.
            AdapterRefused: an engine cannot serve the adapter.
            EngineUnavailable: there is no engine, or an engine ended before it answered.
        """
        async with self.catalog.changing:
            if self.catalog.find(name) is not None and not in_place:
                raise AdapterExists(name)
            answers = await self._engines.operate("load_adapter", name, path, works=True)
            for loaded, problem in answers:
                if loaded is None:
                    raise AdapterRefused(problem)
            adapter, *others = (loaded for loaded, _ in answers)
            if any(other != adapter for other in others):
                raise AdapterRefused("its files differ from engine to engine")
            await self._put(name, adapter)
            return adapter
