"""Values that replicas of an application keep for later ones."""

import asyncio
from collections.abc import Callable
from typing import Any

KEEP_S = 30.0
"""For the cluster's memory to answer."""


class ClusterMemory:
    """The cluster's own memory, which outlives every replica and router, and ends with the cluster.

    Args:
        key: of one build of an application: another one begins with nothing. None keeps nothing.
    """

    def __init__(self, key: str | None) -> None:
        self._key = key

    async def read(self, kind: bytes, name: str = "") -> str | None:
        """Value that was kept last; None where none was. Raises TimeoutError where the cluster does not answer."""
        if self._key is None:
            return None
        from ray.experimental.internal_kv import _internal_kv_get

        found = await _answered(_internal_kv_get, self._key + name, namespace=kind)
        return None if found is None else found.decode()

    async def write(self, kind: bytes, value: str, name: str = "") -> None:
        """Keep a value. Raises TimeoutError where the cluster does not answer."""
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
