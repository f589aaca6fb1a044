"""Things that requests name, as routers and replicas know them; the last change of a name counts.

Every router has the whole list, and so has every replica, which keeps it for routers to come: a change is told to all
replicas, and by each of them to its routers.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

from wingbeat.deployments.parts import hooks

VARIANTS = "variants"
"""Kind of the model's variants, which requests name in its place."""
KINDS = (VARIANTS, *chain(*hooks("names")))
"""Kinds of things that engines keep, as a `Keeper` of theirs does."""
Thing = TypeVar("Thing")


class CatalogEntry(NamedTuple, Generic[Thing]):
    """What a name stands for."""

    name: str
    version: int
    """Nanoseconds since 1970 by the clock of the router that changed it, but later than what that had heard of; 0 for
    what the settings say."""
    thing: Thing | None
    """None for one that is gone."""


NameChanges = Mapping[str, tuple[CatalogEntry[Any], ...]]
"""Changes as they travel, by kind: the whole of each kind whose names are not as they were."""


class Catalog(Generic[Thing]):
    """Names and what they stand for."""

    def __init__(self) -> None:
        self.changing = asyncio.Lock()
        """Held while a router changes a name in all engines."""
        self._entries: dict[str, CatalogEntry[Thing]] = {}

    @property
    def things(self) -> tuple[Thing, ...]:
        """Those that requests may name."""
        return tuple(entry.thing for entry in self._entries.values() if entry.thing is not None)

    def find(self, name: str) -> Thing | None:
        """What a name stands for; None where that is nothing."""
        entry = self._entries.get(name)
        return None if entry is None else entry.thing

    def next_version(self, name: str) -> int:
        """Of a change that is made now."""
        before = self._entries.get(name)
        return max(time.time_ns(), 0 if before is None else before.version + 1)

    def put(self, name: str, thing: Thing | None, version: int | None = None) -> None:
        """Let a name stand for something from now on, or for nothing.

        Args:
            version: of `next_version`; None takes the next one.
        """
        self._entries[name] = CatalogEntry(name, self.next_version(name) if version is None else version, thing)

    def merge(self, entries: Iterable[CatalogEntry[Thing]]) -> bool:
        """Take over what is newer; returns whether anything was."""
        changed = False
        for entry in entries:
            before = self._entries.get(entry.name)
            if before is None or before.version < entry.version:
                self._entries[entry.name] = entry
                changed = True
        return changed

    def changes(self) -> tuple[CatalogEntry[Thing], ...]:
        """What differs from the settings, to be merged elsewhere."""
        return tuple(entry for entry in self._entries.values() if entry.version)


class Names:
    """All that requests can name, beside the model: a catalog by kind."""

    def __init__(self) -> None:
        self.catalogs: dict[str, Catalog[Any]] = {kind: Catalog() for kind in KINDS}

    def merge(self, changes: NameChanges) -> NameChanges:
        """Take over what is newer; returns the whole of each kind of which something was."""
        return {kind: self.catalogs[kind].changes() for kind in changes if self.catalogs[kind].merge(changes[kind])}

    def changes(self) -> NameChanges:
        """What differs from the settings."""
        return {kind: found for kind, catalog in self.catalogs.items() if (found := catalog.changes())}
