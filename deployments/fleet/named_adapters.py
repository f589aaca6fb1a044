"""Adapters that a router's `user_config` names: they are served, and those that it no longer names are not."""

import asyncio
import time
from collections.abc import Mapping

from wingbeat.deployments.fleet.adapters import AdapterRefused, FleetAdapters
from wingbeat.deployments.fleet.interface import EngineUnavailable

ENGINES_S = 60.0
"""For an engine to be there that reads an adapter: a router that starts is not connected yet."""
POLL_S = 0.5


class NamedAdapters:
    """What one router has taken over; each router does so by itself, and the same twice is as once."""

    def __init__(self, adapters: FleetAdapters) -> None:
        self._adapters = adapters
        self._paths: dict[str, str] = {}

    async def take(self, paths: Mapping[str, str]) -> None:
        """Load what is new or has another folder, then unload what is named no longer.

        Args:
            paths: by name, a folder below `lora_update_dir`.

        Raises:
            ValueError: an adapter cannot be served, or no engine answers; what was loaded until then stays.
        """
        for name, path in paths.items():
            if self._paths.get(name) != path:
                await self._load(name, path)
                self._paths[name] = path
        for name in [name for name in self._paths if name not in paths]:
            await self._adapters.unload(name)
            del self._paths[name]

    async def _load(self, name: str, path: str) -> None:
        deadline = time.monotonic() + ENGINES_S
        while True:
            try:
                await self._adapters.load(name, path, in_place=True)
                return
            except AdapterRefused as error:
                raise ValueError(f"user_config.lora_modules: {name!r} cannot be served: {error}") from None
            except EngineUnavailable:
                if time.monotonic() > deadline:
                    raise ValueError(f"user_config.lora_modules: no engine has read {name!r}") from None
                await asyncio.sleep(POLL_S)
