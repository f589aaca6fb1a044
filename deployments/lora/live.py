"""Adapters that a router's `user_config` names: loads new adapters, and unloads adapters that are no longer named."""

import asyncio
import time
from collections.abc import Mapping, Sequence

from wingbeat.deployments.fleet.interface import EngineUnavailable
from wingbeat.deployments.live_settings.live_options import LiveOptions
from wingbeat.deployments.lora.fleet import AdapterRefused, FleetAdapters
from wingbeat.deployments.model_front import ModelFront

ENGINES_S = 60.0
"""Maximum seconds to wait for an engine that can read an adapter. A wait may be needed, because a router that has just
started is not yet connected to engines.
"""
POLL_S = 0.5


class NamedAdapters:
    """Adapters of `user_config` that one router has applied. Each router applies them independently; applying an
    adapter a second time changes nothing.

    Args:
        fronts: the router's models.
    """

    def __init__(self, fronts: Sequence[ModelFront]) -> None:
        self._fronts = fronts
        self._paths: dict[str, str] = {}

    async def apply(self, live: LiveOptions) -> None:
        """Load adapters that are new or have another folder, then unload adapters that are no longer named.

        Raises:
            ValueError: an adapter cannot be served, or no engine answers; adapters that were loaded before the error
                stay loaded.
        """
        paths, first = live.lora_modules, self._fronts[0]
        if (problem := self._problem_of(paths)) is not None:
            raise ValueError(f"user_config.lora_modules: {problem}")
        for name, path in paths.items():
            if self._paths.get(name) != path:
                await _load(FleetAdapters(first.pool), name, path)
                self._paths[name] = path
        for name in [name for name in self._paths if name not in paths]:
            await FleetAdapters(first.pool).delete(name)
            del self._paths[name]

    def _problem_of(self, adapters: Mapping[str, str]) -> str | None:
        """Return the reason why these adapters cannot be served, as far as it is known without reading their folders;
        None if no reason is known.
        """
        if not adapters:
            return None
        if len(self._fronts) > 1:
            return "there are several models; load adapters by HTTP"
        config = self._fronts[0].config
        if config.lora_update_dir is None:
            return "lora_update_dir is not set, so engines have no room for further adapters"
        if config.may_sleep():
            return "with min_replicas 0 there may be no engine to read them; use the setting lora_modules"
        taken = [name for name in adapters if name in config.all_names()]
        return f"the settings define {taken[0]!r} already" if taken else None


async def _load(adapters: FleetAdapters, name: str, path: str) -> None:
    deadline = time.monotonic() + ENGINES_S
    while True:
        try:
            await adapters.load(name, path, in_place=True)
            return
        except AdapterRefused as error:
            raise ValueError(f"user_config.lora_modules: {name!r} cannot be served: {error}") from None
        except EngineUnavailable:
            if time.monotonic() > deadline:
                raise ValueError(f"user_config.lora_modules: no engine has read {name!r}") from None
            await asyncio.sleep(POLL_S)
