"""Hooks of LoRA adapters. The implementation is imported only when needed, because commands import this file."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

    from wingbeat.deployments.api.served_models import ServedModels
    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.runtime.engine.engine import Engine
    from wingbeat.runtime.scheduling.request import Variant

check_settings = "wingbeat.deployments.lora.settings:check_settings"
engine_limits = "wingbeat.deployments.lora.settings:engine_limits"
live_settings = "wingbeat.deployments.lora.settings:LIVE_SETTINGS"
settings = "wingbeat.deployments.lora.settings:SETTINGS"
text_identity = "wingbeat.deployments.lora.settings:text_identity"
variant_names = "wingbeat.deployments.lora.settings:variant_names"
bodies = "wingbeat.deployments.lora.routes:BODIES"
families = "wingbeat.deployments.lora.families:lora_requests"
follow_live = "wingbeat.deployments.lora.live:NamedAdapters"
keepers = "wingbeat.deployments.lora.keeper:keepers"
operations = "wingbeat.deployments.lora.keeper:operations"
operator_paths = "wingbeat.deployments.lora.routes:BODIES"


def surface(config: "AppConfig") -> dict[str, Any]:
    """Return the value that the adapters' routes need: whether operators may load and unload adapters."""
    return {"loads_adapters": config.lora_update_dir is not None}


def add_routes(app: "FastAPI", models: "ServedModels") -> None:
    """Add `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` if the settings of at least one model allow loading."""
    if any(service.of_parts.get("loads_adapters") for service in models):
        from wingbeat.deployments.lora.routes import add_adapter_routes

        add_adapter_routes(app, models)


def variants(config: "AppConfig", engine: "Engine") -> "tuple[Variant, ...]":
    """Return the adapters of the settings; also load as many of them as the engine has slots for."""
    adapters = engine.loaded.parts.get("adapters")
    folders = (config.lora_modules or {}).items()
    served = tuple(adapters.inspect(name, folder.resolve()) for name, folder in folders)
    for adapter in served[: config.max_loras]:
        adapters.resident.warm(adapter)
    return served
