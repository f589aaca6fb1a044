"""Adapters of an engine under the names that requests give."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.catalog import VARIANTS
from wingbeat.runtime.scheduling.request import RequestOutput, Variant

if TYPE_CHECKING:
    from wingbeat.runtime.engine.engine import Engine
    from wingbeat.runtime.lora.places import AdapterPlaces

LOADS_NONE = "this engine loads none; lora_update_dir says whether and from where"


class AdapterKeeper:
    """Frees an adapter's place once no name stands for it; see `Keeper`.

    Args:
        adapters: of the engine.
        root: `lora_update_dir`.
    """

    def __init__(self, adapters: "AdapterPlaces", root: Path | None) -> None:
        self._adapters, self._root = adapters, root
        self._named: dict[str, Variant] = {}

    def load(self, name: str, path: str) -> tuple[Variant | None, str]:
        """Read and check an adapter below `lora_update_dir`: its name, or None and why it is not served."""
        root = self._root
        if root is None:
            return None, LOADS_NONE
        try:
            if not (root / path).resolve().is_relative_to(root.resolve()):
                return None, f"{path} is not below lora_update_dir"
            adapter = self._adapters.inspect(name, root / path)
            self._adapters.resident.warm(adapter)
        except (ValueError, OSError, RuntimeError) as error:  # whatever a path can lead to, such as a circle of links
            return None, str(error)
        return adapter, ""

    def open(self, variants: Iterable[Variant] = ()) -> tuple[Variant, ...]:
        """Begin with the adapters of the settings; others are on no disk of the engine's."""
        self._named = {adapter.name: adapter for adapter in variants}
        return ()

    def keep(self, entries: Iterable[tuple[str, int, Variant | None]]) -> None:
        """Let names stand for adapters, None for no longer; running sequences keep theirs."""
        before = self._named
        now = before | {name: adapter for name, _, adapter in entries}
        self._named = {name: adapter for name, adapter in now.items() if adapter is not None}
        for digest in _digests(before) - _digests(self._named):
            self._adapters.resident.unload(digest)

    def take(self, output: RequestOutput) -> None:
        """Nothing: no request is the keeper's own."""

    def close(self) -> None:
        """Nothing: no file is written."""


def load_none(name: str, path: str) -> tuple[None, str]:
    """`AdapterKeeper.load` of an engine without room for adapters."""
    return None, LOADS_NONE


def _digests(named: Mapping[str, Variant]) -> set[str]:
    return {adapter.digest for adapter in named.values()}


def keepers(config: AppConfig, engine: "Engine") -> dict[str, AdapterKeeper]:
    """Keeper of adapters, where the engine has room for some."""
    adapters = engine.loaded.parts.get("adapters")
    return {} if adapters is None else {VARIANTS: AdapterKeeper(adapters, config.lora_update_dir)}


def operations(keepers: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Operation by which a router has an engine read an adapter."""
    return {"load_adapter": getattr(keepers.get(VARIANTS), "load", load_none)}
