"""Directory of live engines, which Serve's request router writes and the engine pool of the same process reads."""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

Listener = Callable[[frozenset[str]], None]
Deployment = Any
"""Serve's DeploymentID, used only as a dictionary key."""


class EngineDirectory:
    """Live engines per deployment, with listeners; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[Deployment, frozenset[str]] = {}
        self._listeners: defaultdict[Deployment, list[Listener]] = defaultdict(list)

    def publish(self, deployment: Deployment, engine_ids: frozenset[str]) -> None:
        """Replaces the live engines of a deployment; if the set has changed, calls the deployment's listeners."""
        with self._lock:
            if self._engines.get(deployment) == engine_ids:
                return
            self._engines[deployment] = engine_ids
            listeners = list(self._listeners[deployment])
        for listener in listeners:
            listener(engine_ids)

    def remove(self, deployment: Deployment, engine_id: str) -> None:
        """Removes an engine that is known to be dead."""
        self.publish(deployment, self.engines(deployment) - {engine_id})

    def engines(self, deployment: Deployment) -> frozenset[str]:
        """Returns the ids of the live engines."""
        with self._lock:
            return self._engines.get(deployment, frozenset())

    def subscribe(self, deployment: Deployment, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with the ids of the live engines: now, and after each change, from the thread that reports
        the change.

        Returns the function that ends the subscription.
        """
        with self._lock:
            self._listeners[deployment].append(listener)
            engine_ids = self._engines.get(deployment, frozenset())
        listener(engine_ids)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners[deployment].remove(listener)

        return unsubscribe


DIRECTORY = EngineDirectory()
"""Directory of this process. The object is global, because Serve itself constructs the request router that writes to
the directory, so no object can be passed to it.
"""
