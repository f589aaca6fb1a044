"""Named things that requests refer to (variants, saved prefixes), replicated in all routers and replicas.

Each router and each replica holds all names. A router sends a change to all replicas, and each replica passes the
change on to its routers, including routers that connect later. If a name is changed twice, the later change is kept.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

from wingbeat.deployments.parts import hooks

VARIANTS = "variants"
"""Kind of the names of the model's variants. A request may name a variant instead of the model."""
KINDS = (VARIANTS, *chain(*hooks("names")))
"""All kinds of named things. For each kind, a `Keeper` in every engine holds the things."""
Thing = TypeVar("Thing")


class CatalogEntry(NamedTuple, Generic[Thing]):
    """A name, the version of its last change, and the thing that the name refers to."""

    name: str
    version: int
    """Unix time in nanoseconds by the clock of the router that made the change, raised if necessary above all versions
    that this router knew. Names from the settings have version 0.
    """
    thing: Thing | None
    """The thing that the name refers to; None if the name was deleted."""


NameChanges = Mapping[str, tuple[CatalogEntry[Any], ...]]
"""Changes in transit: for each kind in which a name has changed, all entries of the kind."""


class Catalog(Generic[Thing]):
    """Names of one kind and the things they refer to."""

    def __init__(self) -> None:
        self.changing = asyncio.Lock()
        """Lock that a router holds while it changes a name in all engines."""
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
        """Returns the version for a change that is made now."""
        before = self._entries.get(name)
        return max(time.time_ns(), 0 if before is None else before.version + 1)

    def put(self, name: str, thing: Thing | None, version: int | None = None) -> None:
        """Makes a name refer to `thing`; with None, deletes the name.

        Args:
            version: version from `next_version`; with None, the next version is used.
        """
        self._entries[name] = CatalogEntry(name, self.next_version(name) if version is None else version, thing)

    def merge(self, entries: Iterable[CatalogEntry[Thing]]) -> bool:
        """Takes over the entries that are newer than this catalog's entries of the same names; returns whether there
        were any.
        """
        changed = False
        for entry in entries:
            before = self._entries.get(entry.name)
            if before is None or before.version < entry.version:
                self._entries[entry.name] = entry
                changed = True
        return changed

    def changes(self) -> tuple[CatalogEntry[Thing], ...]:
        """Returns the entries that differ from the settings; other catalogs get them by `merge`."""
        return tuple(entry for entry in self._entries.values() if entry.version)


class Names:
    """All catalogs, by kind."""

    def __init__(self) -> None:
        self.catalogs: dict[str, Catalog[Any]] = {kind: Catalog() for kind in KINDS}

    def merge(self, changes: NameChanges) -> NameChanges:
        """Takes over the entries that are newer than those held here. Returns all entries of each kind in which an
        entry was newer.
        """
        return {kind: self.catalogs[kind].changes() for kind in changes if self.catalogs[kind].merge(changes[kind])}

    def changes(self) -> NameChanges:
        """Returns the entries that differ from the settings, by kind."""
        return {kind: found for kind, catalog in self.catalogs.items() if (found := catalog.changes())}
