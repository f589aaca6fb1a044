"""Named things that requests refer to (variants, saved prefixes), replicated in routers and replicas.

The latest change of a name wins. Every router and every replica holds the whole list: a router sends a change to all
replicas, and each replica passes it on to its routers, including routers that start later.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

from wingbeat.deployments.parts import hooks

VARIANTS = "variants"
"""Kind of the model's variants, which requests name instead of the model."""
KINDS = (VARIANTS, *chain(*hooks("names")))
"""All kinds of named things; a `Keeper` in each engine holds the things of a kind."""
Thing = TypeVar("Thing")


class CatalogEntry(NamedTuple, Generic[Thing]):
    """A name, the version of its last change, and the thing that the name refers to."""

    name: str
    version: int
    """Unix time in nanoseconds by the clock of the router that made the change, but above every version that the router
    knew; 0 for names from the settings.
    """
    thing: Thing | None
    """None for a deleted name."""


NameChanges = Mapping[str, tuple[CatalogEntry[Any], ...]]
"""Changes in transit, by kind: all entries of each kind in which a name has changed."""


class Catalog(Generic[Thing]):
    """Names of one kind and the things they refer to."""

    def __init__(self) -> None:
        self.changing = asyncio.Lock()
        """Lock held while a router changes a name in all engines."""
        self._entries: dict[str, CatalogEntry[Thing]] = {}

    @property
    def things(self) -> tuple[Thing, ...]:
        """Things that requests may name."""
        return tuple(entry.thing for entry in self._entries.values() if entry.thing is not None)

    def find(self, name: str) -> Thing | None:
        """Returns the thing with this name; None if there is none."""
        entry = self._entries.get(name)
        return None if entry is None else entry.thing

    def next_version(self, name: str) -> int:
        """Returns the version for a change made now."""
        before = self._entries.get(name)
        return max(time.time_ns(), 0 if before is None else before.version + 1)

    def put(self, name: str, thing: Thing | None, version: int | None = None) -> None:
        """Sets or, with None, deletes the thing of a name.

        Args:
            version: version from `next_version`; None takes the next one.
        """
        self._entries[name] = CatalogEntry(name, self.next_version(name) if version is None else version, thing)

    def merge(self, entries: Iterable[CatalogEntry[Thing]]) -> bool:
        """Takes over entries that are newer; returns whether there was such an entry."""
        changed = False
        for entry in entries:
            before = self._entries.get(entry.name)
            if before is None or before.version < entry.version:
                self._entries[entry.name] = entry
                changed = True
        return changed

    def changes(self) -> tuple[CatalogEntry[Thing], ...]:
        """Returns the entries that differ from the settings, to be merged elsewhere."""
        return tuple(entry for entry in self._entries.values() if entry.version)


class Names:
    """All catalogs, by kind."""

    def __init__(self) -> None:
        self.catalogs: dict[str, Catalog[Any]] = {kind: Catalog() for kind in KINDS}

    def merge(self, changes: NameChanges) -> NameChanges:
        """Takes over entries that are newer; returns all entries of each kind that had such an entry."""
        return {kind: self.catalogs[kind].changes() for kind in changes if self.catalogs[kind].merge(changes[kind])}

    def changes(self) -> NameChanges:
        """Returns the entries that differ from the settings, by kind."""
        return {kind: found for kind, catalog in self.catalogs.items() if (found := catalog.changes())}
