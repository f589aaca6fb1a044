"""Tracks which adapters are loaded in an engine; their number is limited. Uses no tensors.

Adapters of running sequences stay loaded. Of the other adapters, the least recently used is evicted if a slot is
needed; an evicted adapter is read again when a request needs it.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from wingbeat.runtime.scheduling.request import Request, Variant


@dataclass
class _Resident:
    """An adapter that is in a slot, and its users."""

    adapter_id: int
    num_users: int = 0
    unwanted: bool = False
    """Whether to unload the adapter as soon as no sequence uses it any more."""


class ResidentAdapters:
    """Owner of the adapter slots 1 to `max_loras`.

    Args:
        load: function that reads an adapter's files into a slot; raises if the adapter cannot be served.
        clear: function that empties a slot.
    """

    def __init__(self, max_loras: int, load: Callable[[Variant, int], None], clear: Callable[[int], None]) -> None:
        self._load = load
        self._clear = clear
        self._free = list(range(max_loras, 0, -1))
        self._held: OrderedDict[str, _Resident] = OrderedDict()
        """Held adapters by digest, least recently used first."""

    def reserve(self, request: Request) -> int | None:
        """See `Seats.reserve`."""
        return 0 if request.variant is None else self.acquire(request.variant)

    def give_back(self, request: Request) -> None:
        """See `Seats.give_back`."""
        if request.variant is not None:
            self.release(request.variant)

    def has_seat(self, request: Request) -> bool:
        """See `Seats.has_seat`."""
        return request.variant is None or self.has_place(request.variant)

    def acquire(self, adapter: Variant) -> int | None:
        """Returns an adapter's slot for one more user. Reads the adapter's files if the adapter is not loaded. Returns
        None if the adapter is not loaded and all slots are in use.

        Raises:
            AdapterError: the adapter's files have changed and cannot be served.
        """
        held = self._held.get(adapter.digest) or self._admit(adapter)
        if held is None:
            return None
        held.num_users += 1
        self._held.move_to_end(adapter.digest)
        return held.adapter_id

    def has_place(self, adapter: Variant) -> bool:
        """Whether `acquire` would return a slot for this adapter."""
        return bool(self._free) or adapter.digest in self._held or any(not one.num_users for one in self._held.values())

    def release(self, adapter: Variant) -> None:
        """Ends one use of an adapter."""
        held = self._held[adapter.digest]
        held.num_users -= 1
        if held.unwanted and not held.num_users:
            self._drop(adapter.digest)

    def warm(self, adapter: Variant) -> None:
        """Reads an adapter before its first request, if a slot is free or can be freed.

        Raises:
            AdapterError: the adapter's files cannot be served.
        """
        held = self._held.get(adapter.digest) or self._admit(adapter)
        if held is not None:
            held.unwanted = False

    def unload(self, digest: str) -> None:
        """Frees an adapter's slot, at once or when the last sequence that uses the adapter has ended."""
        held = self._held.get(digest)
        if held is None:
            return
        held.unwanted = True
        if not held.num_users:
            self._drop(digest)

    def num_users(self, digest: str) -> int:
        """Returns the number of running sequences that use an adapter."""
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
