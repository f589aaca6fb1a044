"""Values that replicas of an application store in Ray's key-value store for replicas that start later."""

import asyncio
from collections.abc import Callable
from typing import Any

KEEP_S = 30.0
"""Maximum seconds to wait for an answer of Ray's key-value store."""


class ClusterMemory:
    """Ray's internal key-value store, which outlives all replicas and routers and ends with the cluster.

    Args:
        key: prefix that is unique to one build of an application, so that another build does not see this build's
            values. With None, nothing is stored.
    """

    def __init__(self, key: str | None) -> None:
        self._key = key

    async def read(self, kind: bytes, name: str = "") -> str | None:
        """Return the value that was written last; None if no value was written. Raises TimeoutError if the store has
        not answered within `KEEP_S`.
        """
        if self._key is None:
            return None
        from ray.experimental.internal_kv import _internal_kv_get

        found = await _answered(_internal_kv_get, self._key + name, namespace=kind)
        return None if found is None else found.decode()

    async def write(self, kind: bytes, value: str, name: str = "") -> None:
        """Store a value; raises TimeoutError if the store has not answered within `KEEP_S`."""
        if self._key is None:
            return
        from ray.experimental.internal_kv import _internal_kv_put

        await _answered(_internal_kv_put, self._key + name, value, namespace=kind)


async def _answered(call: Callable[..., Any], *given: Any, **more: Any) -> Any:
    try:
        async with asyncio.timeout(KEEP_S):
            return await asyncio.to_thread(call, *given, **more)
    except TimeoutError:
        raise TimeoutError(f"the cluster's memory has not answered within {KEEP_S:.0f} s") from None
