"""Which adapters an engine holds: a bounded number, the least recently used one makes room; knows no tensors.

An adapter that a running sequence has stays. All others may go, and are read again when a request comes for them.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from wingbeat.runtime.scheduling.request import Request, Variant


@dataclass
class _Resident:
    """An adapter in its place."""

    adapter_id: int
    num_users: int = 0
    unwanted: bool = False
    """Whether it goes once nobody uses it."""


class ResidentAdapters:
    """Owner of the places, 1 to `max_loras`.

    Args:
        load: reads an adapter's files into a place; raises where they cannot be served.
        clear: empties a place.
    """

    def __init__(self, max_loras: int, load: Callable[[Variant, int], None], clear: Callable[[int], None]) -> None:
        self._load = load
        self._clear = clear
        self._free = list(range(max_loras, 0, -1))
        self._held: OrderedDict[str, _Resident] = OrderedDict()
        """By digest, the least recently used one first."""

    def take(self, request: Request) -> int | None:
        """See `Seats.take`."""
        return 0 if request.variant is None else self.acquire(request.variant)

    def give_back(self, request: Request) -> None:
        """See `Seats.give_back`."""
        if request.variant is not None:
            self.release(request.variant)

    def has_seat(self, request: Request) -> bool:
        """See `Seats.has_seat`."""
        return request.variant is None or self.has_place(request.variant)

    def acquire(self, adapter: Variant) -> int | None:
        """The place of an adapter for one more user, read from its files if need be; None where all are in use.

        Raises:
            AdapterError: its files cannot be served any more.
        """
        held = self._held.get(adapter.digest) or self._admit(adapter)
        if held is None:
            return None
        held.num_users += 1
        self._held.move_to_end(adapter.digest)
        return held.adapter_id

    def has_place(self, adapter: Variant) -> bool:
        """Whether `acquire` would find a place."""
        return bool(self._free) or adapter.digest in self._held or any(not one.num_users for one in self._held.values())

    def release(self, adapter: Variant) -> None:
        """One user less."""
        held = self._held[adapter.digest]
        held.num_users -= 1
        if held.unwanted and not held.num_users:
            self._drop(adapter.digest)

    def warm(self, adapter: Variant) -> None:
        """Read an adapter ahead of its first request, where a place is free or comes free by that.

        Raises:
            AdapterError: its files cannot be served.
        """
        held = self._held.get(adapter.digest) or self._admit(adapter)
        if held is not None:
            held.unwanted = False

    def unload(self, digest: str) -> None:
        """Free an adapter's place, at once or when its last user has ended."""
        held = self._held.get(digest)
        if held is None:
            return
        held.unwanted = True
        if not held.num_users:
            self._drop(digest)

    def num_users(self, digest: str) -> int:
        """Sequences that run with an adapter."""
        held = self._held.get(digest)
        return 0 if held is None else held.num_users

    def _admit(self, adapter: Variant) -> _Resident | None:
        if not self._free:
            idle = next((digest for digest, held in self._held.items() if not held.num_users), None)
            if idle is None:
                return None
            self._drop(idle)
        adapter_id = self._free[-1]
        try:
            self._load(adapter, adapter_id)
        except Exception:
            self._clear(adapter_id)
            raise
        self._free.pop()
        held = self._held[adapter.digest] = _Resident(adapter_id)
        return held

    def _drop(self, digest: str) -> None:
        held = self._held.pop(digest)
        self._clear(held.adapter_id)
        self._free.append(held.adapter_id)
