"""Holds an engine's adapters by the names that requests use."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.catalog import VARIANTS
from wingbeat.runtime.scheduling.request import RequestOutput, Variant

if TYPE_CHECKING:
    from wingbeat.runtime.engine.engine import Engine
    from wingbeat.runtime.lora.places import AdapterPlaces

LOADS_NONE = "this engine loads no adapters while it runs; set lora_update_dir to allow that"


class AdapterKeeper:
    """Keeper of an engine's adapters (see `Keeper`), which frees an adapter's slot once no name refers to the adapter.

    Args:
        adapters: slots in which the engine holds adapters.
        root: folder `lora_update_dir`.
    """

    def __init__(self, adapters: "AdapterPlaces", root: Path | None) -> None:
        self._adapters, self._root = adapters, root
        self._named: dict[str, Variant] = {}

    def load(self, name: str, path: str) -> tuple[Variant | None, str]:
        """Read and check an adapter below `lora_update_dir`; returns (adapter, "") or (None, reason)."""
        root = self._root
        if root is None:
            return None, LOADS_NONE
        try:
            if not (root / path).resolve().is_relative_to(root.resolve()):
                return None, f"{path} is not below lora_update_dir"
            adapter = self._adapters.inspect(name, root / path)
            self._adapters.resident.warm(adapter)
        # the path may cause other errors too, for example by a cycle of links
        except (ValueError, OSError, RuntimeError) as error:
            return None, str(error)
        return adapter, ""

    def open(self, variants: Iterable[Variant] = ()) -> tuple[Variant, ...]:
        """Bind the adapters of the settings. At the start there are no other adapters, because engines do not store
        adapters on disk.
        """
        self._named = {adapter.name: adapter for adapter in variants}
        return ()

    def keep(self, entries: Iterable[tuple[str, int, Variant | None]]) -> None:
        """Bind names to adapters; for a name whose adapter is None, remove the name. Running sequences keep their
        adapter.
        """
        before = self._named
        now = before | {name: adapter for name, _, adapter in entries}
        self._named = {name: adapter for name, adapter in now.items() if adapter is not None}
        for digest in _digests(before) - _digests(self._named):
            self._adapters.resident.unload(digest)

    def take(self, output: RequestOutput) -> None:
        """Do nothing, because the keeper makes no requests of its own."""

    def close(self) -> None:
        """Do nothing, because the keeper writes no files."""


def load_none(name: str, path: str) -> tuple[None, str]:
    """Refuse an adapter; used instead of `AdapterKeeper.load` in an engine that has no slots for adapters."""
    return None, LOADS_NONE


def _digests(named: Mapping[str, Variant]) -> set[str]:
    return {adapter.digest for adapter in named.values()}


def keepers(config: AppConfig, engine: "Engine") -> dict[str, AdapterKeeper]:
    """Return the keeper of adapters if the engine has slots for adapters, else an empty dict."""
    adapters = engine.loaded.parts.get("adapters")
    return {} if adapters is None else {VARIANTS: AdapterKeeper(adapters, config.lora_update_dir)}


def operations(keepers: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the operation by which a router makes an engine read an adapter."""
    return {"load_adapter": getattr(keepers.get(VARIANTS), "load", load_none)}
