"""LoRA adapters; imported by commands too, so that it imports what it adds where it adds it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wingbeat.deployments.lora.settings import (
    check_settings,
    engine_limits,
    live_settings,
    settings,
    text_identity,
    variant_names,
)

if TYPE_CHECKING:
    from fastapi import FastAPI
    from prometheus_client import Metric

    from wingbeat.deployments.api.bodies.request_body import RequestBody
    from wingbeat.deployments.api.served_models import ServedModels
    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.lora.keeper import AdapterKeeper
    from wingbeat.deployments.lora.live import NamedAdapters
    from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
    from wingbeat.deployments.model_front import ModelFront
    from wingbeat.deployments.replica.engine.engine_setup import Keeper
    from wingbeat.runtime.engine.engine import Engine
    from wingbeat.runtime.lora.places import AdapterPlaces
    from wingbeat.runtime.scheduling.request import Variant

__all__ = ["check_settings", "engine_limits", "live_settings", "settings", "text_identity", "variant_names"]


def follow_live(fronts: "Sequence[ModelFront]") -> "NamedAdapters":
    """Adapters that the `user_config` of routers names."""
    from wingbeat.deployments.lora.live import NamedAdapters

    return NamedAdapters(fronts)


def surface(config: "AppConfig") -> dict[str, Any]:
    """Whether operators may load and unload adapters."""
    return {"loads_adapters": config.lora_update_dir is not None}


def add_routes(app: "FastAPI", models: "ServedModels") -> None:
    """Add `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, where a model may load some."""
    if any(service.of_parts.get("loads_adapters") for service in models):
        from wingbeat.deployments.lora.routes import add_adapter_routes

        add_adapter_routes(app, models)


def operator_paths() -> tuple[str, ...]:
    """Paths by which adapters are loaded and unloaded."""
    return tuple(bodies())


def bodies() -> "Mapping[str, type[RequestBody]]":
    """Their bodies."""
    from wingbeat.deployments.lora.routes import LOAD_PATH, UNLOAD_PATH, LoadAdapterBody, UnloadAdapterBody

    return {LOAD_PATH: LoadAdapterBody, UNLOAD_PATH: UnloadAdapterBody}


def families(snapshot: "FleetSnapshot") -> "Iterator[Metric]":
    """Adapters that the requests of engines have."""
    from wingbeat.deployments.lora.families import lora_requests

    yield lora_requests(snapshot)


def variants(config: "AppConfig", engine: "Engine") -> "tuple[Variant, ...]":
    """The adapters of the settings, as many read as an engine holds."""
    adapters = _adapters_of(engine)
    folders = (config.lora_modules or {}).items()
    served = tuple(adapters.inspect(name, folder.resolve()) for name, folder in folders)
    for adapter in served[: config.max_loras]:
        adapters.resident.warm(adapter)
    return served


def keepers(config: "AppConfig", engine: "Engine") -> "dict[str, AdapterKeeper]":
    """Keeper of adapters, where the engine has room for some."""
    from wingbeat.deployments.fleet.catalog import VARIANTS
    from wingbeat.deployments.lora.keeper import AdapterKeeper

    adapters = _adapters_of(engine)
    return {} if adapters is None else {VARIANTS: AdapterKeeper(adapters, config.lora_update_dir)}


def operations(keepers: "Mapping[str, Keeper]") -> dict[str, Callable[..., Any]]:
    """Operation by which a router has an engine read an adapter."""
    from wingbeat.deployments.fleet.catalog import VARIANTS
    from wingbeat.deployments.lora.keeper import load_none

    return {"load_adapter": getattr(keepers.get(VARIANTS), "load", load_none)}


def _adapters_of(engine: "Engine") -> "AdapterPlaces | None":
    return engine.loaded.parts.get("adapters")
