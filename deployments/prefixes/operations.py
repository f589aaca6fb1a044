"""Operations on saved prefixes that routers request from an engine."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix

if TYPE_CHECKING:
    from wingbeat.runtime.prefixes.prefix_keeper import PrefixKeeper, Refusal


class PrefixOperations:
    """Operations on prefixes, which an engine's keeper of prefixes executes. If the engine has no keeper, prefixes are
    refused.
    """

    def __init__(self, keeper: "PrefixKeeper | None") -> None:
        self._prefixes = keeper

    def save_prefix(self, prefix: SavedPrefix) -> "Future[Refusal | None] | tuple[str, str]":
        """Compute and pin a prefix. The result is None on success; if the prefix is refused, an error code and the
        reason.
        """
        if self._prefixes is None:
            return "invalid_value", "cannot be kept: this engine keeps no prefixes"
        return self._prefixes.save(prefix)

    def drop_prefix(self, name: str, version: int) -> None:
        """Unpin a prefix that must not be kept, because another engine has refused it."""
        if self._prefixes is not None:
            self._prefixes.drop(name, version)

    def stored_prefix(self, name: str) -> SavedPrefix | None:
        """Return the prefix with this name on disk, or None."""
        return None if self._prefixes is None else self._prefixes.stored(name)

    def describe_prefixes(self) -> dict[str, Any]:
        """Return the pinned prefixes and token counts."""
        if self._prefixes is None:
            return {"pinned_tokens": 0, "max_pinned_tokens": 0, "prefixes": []}
        return self._prefixes.describe()


def operations(keepers: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the operations on prefixes that routers may request, by name."""
    own = PrefixOperations(keepers.get("prefixes"))
    return {name: getattr(own, name) for name in vars(PrefixOperations) if not name.startswith("_")}
