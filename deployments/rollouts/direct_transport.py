"""References whose tensors stay in the memory of a trainer's actor (Ray Direct Transport).

Ray sends such tensors directly only to actors that the caller has put into a communication group or started for that
transport. Serve starts the engines' replicas itself, so neither is possible, and the tensors are copied through the
object store instead.
"""

import asyncio
from typing import Any

from wingbeat.deployments.rollouts.fleet_rollouts import Refused

FETCH_S = 120.0
"""Maximum seconds to wait for the tensors of a trainer's actor."""


async def in_object_store(reference: Any) -> Any:
    """Return a reference to the same object in Ray's object store; any other value is returned unchanged.

    Raises:
        Refused: the actor does not give its tensors.
    """
    transport = getattr(reference, "tensor_transport", lambda: None)()
    if not transport:
        return reference
    import ray
    from ray.exceptions import RayError

    def fetched() -> Any:
        return ray.put(ray.get(reference, timeout=FETCH_S, _use_object_store=True))

    try:
        return await asyncio.to_thread(fetched)
    # Ray raises errors of many kinds, a TypeError if this version of Ray cannot fetch such tensors
    except (RayError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Refused(f"tensors are of Ray's transport {transport}, and cannot be fetched: {reason}") from None
