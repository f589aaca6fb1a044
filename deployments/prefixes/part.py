"""Saved prefixes; imported by commands too, so that it imports what it adds where it adds it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from wingbeat.deployments.prefixes.settings import asked, check_settings, refusals, settings

if TYPE_CHECKING:
    import typer
    from fastapi import FastAPI

    from wingbeat.deployments.api.bodies.request_body import RequestBody
    from wingbeat.deployments.api.bodies.requests import GenerationBody
    from wingbeat.deployments.api.served_models import ServedModels
    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.fleet.engine_pool import EnginePool
    from wingbeat.deployments.prefixes.beginnings import PrefixBeginning
    from wingbeat.deployments.prefixes.fields import PrefixFields
    from wingbeat.deployments.replica.engine.engine_setup import Keeper
    from wingbeat.runtime.engine.engine import Engine
    from wingbeat.runtime.prefixes.prefix_keeper import PrefixKeeper
    from wingbeat.runtime.scheduling.request import Variant

__all__ = ["asked", "check_settings", "refusals", "settings"]


def add_commands(app: "typer.Typer") -> None:
    """Add `wingbeat prefix`."""
    from wingbeat.deployments.cli.commands import new_app
    from wingbeat.deployments.prefixes.command import add_prefix_commands

    prefix = new_app("Saved prefixes, such as system prompts, of a server that runs.")
    add_prefix_commands(prefix)
    app.add_typer(prefix, name="prefix")


def add_routes(app: "FastAPI", models: "ServedModels") -> None:
    """Add `/v1/prefixes`."""
    from wingbeat.deployments.prefixes.routes import add_prefix_routes

    add_prefix_routes(app, models)


def operator_paths() -> tuple[str, ...]:
    """All of them."""
    from wingbeat.deployments.prefixes.routes import PREFIXES_PATH

    return PREFIXES_PATH, PREFIXES_PATH + "/{name}"


def bodies() -> "Mapping[str, type[RequestBody]]":
    """The body by which a prefix is made."""
    from wingbeat.deployments.prefixes.routes import PREFIXES_PATH, SavePrefixBody

    return {PREFIXES_PATH: SavePrefixBody}


def generation_fields() -> "type[PrefixFields]":
    """The field `prefix`."""
    from wingbeat.deployments.prefixes.fields import PrefixFields

    return PrefixFields


def beginning(pool: "EnginePool", body: "GenerationBody", variant: "Variant | None") -> "PrefixBeginning | None":
    """The saved prefix that a request names."""
    from wingbeat.deployments.prefixes.beginnings import beginning_of

    return beginning_of(pool, body, variant)


def names() -> tuple[str, ...]:
    """Prefixes."""
    return ("prefixes",)


def keepers(config: "AppConfig", engine: "Engine") -> "dict[str, PrefixKeeper]":
    """Keeper of saved prefixes; of a model that is spread over processes their keys and values are not on disk."""
    from wingbeat.runtime.prefixes.identity import identity_of
    from wingbeat.runtime.prefixes.prefix_keeper import PrefixKeeper
    from wingbeat.runtime.prefixes.prefix_store import PrefixStore
    from wingbeat.runtime.verifier.checkpoints.digests import tokenizer_digest

    store = None
    if config.prefix_dir is not None:
        folder, limits = config.model_dir(), engine.config
        identity = identity_of(folder, engine.loaded, limits.block_size, limits.kv_cache_dtype)
        has_contents = config.num_ranks() == 1
        store = PrefixStore(config.prefix_dir, identity, tokenizer_digest(folder), has_contents)
    return {"prefixes": PrefixKeeper(engine, store, config.max_pinned_tokens)}


def operations(keepers: "Mapping[str, Keeper]") -> dict[str, Callable[..., Any]]:
    """Operations on prefixes that routers ask of an engine."""
    from wingbeat.deployments.prefixes.operations import PrefixOperations

    own = PrefixOperations(keepers.get("prefixes"))
    return {name: getattr(own, name) for name in vars(PrefixOperations) if not name.startswith("_")}
