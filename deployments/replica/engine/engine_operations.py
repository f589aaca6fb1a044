"""What routers may ask of an engine: each method is an operation, which its thread runs between two rounds.

A router names one by `EveryEngine.operate`; nothing between the two knows which there are.
"""

from typing import TYPE_CHECKING, Any

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.engine.engine_setup import EngineSetup
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix
from wingbeat.runtime.scheduling.request import AdapterName

if TYPE_CHECKING:
    from concurrent.futures import Future

    from wingbeat.runtime.prefixes.prefix_keeper import Refusal


class EngineOperations:
    """Operations by name; arguments and answers are pickled on their way."""

    def __init__(self, setup: EngineSetup, config: AppConfig) -> None:
        self._engine = setup.engine
        self._adapters = setup.adapters
        self._prefixes = setup.prefixes
        self._config = config

    def reset_prefix_cache(self) -> None:
        """Forget the prefixes that are cached."""
        self._engine.reset_prefix_cache()

    def load_adapter(self, name: str, path: str) -> tuple[AdapterName | None, str]:
        """Read and check an adapter below `lora_update_dir`: its name, or None and why it is not served."""
        root = self._config.lora_update_dir
        if self._adapters is None or root is None:
            return None, "this engine loads none; lora_update_dir says whether and from where"
        try:
            if not (root / path).resolve().is_relative_to(root.resolve()):
                return None, f"{path} is not below lora_update_dir"
            adapter = self._adapters.inspect(name, root / path)
            self._adapters.resident.warm(adapter)
        except (ValueError, OSError, RuntimeError) as error:  # whatever a path can lead to, such as a circle of links
            return None, str(error)
        return adapter, ""

    def unload_adapter(self, digest: str) -> None:
        """Free an adapter's place once no sequence runs with it."""
        if self._adapters is not None:
            self._adapters.resident.unload(digest)

    def save_prefix(self, prefix: SavedPrefix) -> "Future[Refusal | None] | tuple[str, str]":
        """Pin a prefix, once it is computed: None, or code and reason where it cannot be."""
        if self._prefixes is None:
            return "invalid_value", "cannot be kept: this engine keeps no prefixes"
        return self._prefixes.save(prefix)

    def drop_prefix(self, name: str, version: int) -> None:
        """Let go of one that is not to be kept."""
        if self._prefixes is not None:
            self._prefixes.drop(name, version)

    def stored_prefix(self, name: str) -> SavedPrefix | None:
        """The prefix that has this name on disk."""
        return None if self._prefixes is None else self._prefixes.stored(name)

    def describe_prefixes(self) -> dict[str, Any]:
        """What is pinned."""
        if self._prefixes is None:
            return {"pinned_tokens": 0, "max_pinned_tokens": 0, "prefixes": []}
        return self._prefixes.describe()


OPERATIONS = frozenset(name for name in vars(EngineOperations) if not name.startswith("_"))
"""All that a router may name."""
