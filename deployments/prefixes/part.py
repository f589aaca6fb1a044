"""Hooks of saved prefixes. The implementation is imported only when needed, because commands import this file."""

from typing import TYPE_CHECKING

from wingbeat.deployments.parts import first_result

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.runtime.engine.engine import Engine
    from wingbeat.runtime.prefixes.prefix_keeper import PrefixKeeper

asked = "wingbeat.deployments.prefixes.settings:asked"
check_settings = "wingbeat.deployments.prefixes.settings:check_settings"
refusals = "wingbeat.deployments.prefixes.settings:REFUSED"
settings = "wingbeat.deployments.prefixes.settings:SETTINGS"
add_commands = "wingbeat.deployments.prefixes.command:add_commands"
add_routes = "wingbeat.deployments.prefixes.routes:add_prefix_routes"
operator_paths = "wingbeat.deployments.prefixes.routes:PATHS"
bodies = "wingbeat.deployments.prefixes.routes:BODIES"
generation_fields = "wingbeat.deployments.prefixes.fields:PrefixFields"
beginning = "wingbeat.deployments.prefixes.beginnings:beginning_of"
names = ("prefixes",)
operations = "wingbeat.deployments.prefixes.operations:operations"


def keepers(config: "AppConfig", engine: "Engine") -> "dict[str, PrefixKeeper]":
    """Return the keeper of saved prefixes.

    For a model that is spread over several processes, keys and values of prefixes are not stored on disk.
    """
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
    pinned = 0 if first_result("changes_weights", config) else config.max_pinned_tokens
    return {"prefixes": PrefixKeeper(engine, store, pinned)}
