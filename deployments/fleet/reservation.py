"""Places that a router has given out."""

from typing import Protocol


class CountsPlaces(Protocol):
    """Who gives them out; `wingbeat.deployments.fleet.engine_pool.EnginePool` does."""

    num_admitted: int


class Reservation:
    """Places for requests, in the engines or in the queue before them; taken until they are released."""

    def __init__(self, pool: CountsPlaces, num_requests: int) -> None:
        self._pool = pool
        self._num_left = num_requests

    def release(self, num_requests: int | None = None) -> None:
        """Give back some places, or all that are left; more than are left are not given back."""
        num_requests = self._num_left if num_requests is None else min(num_requests, self._num_left)
        self._num_left -= num_requests
        self._pool.num_admitted -= num_requests
