"""Guards a Ray cluster that this process has started."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wingbeat.cluster.channels.doorbell import PeerProcess, process_start
from wingbeat.deployments.ray_guard.head_watch import HeadWatch
from wingbeat.deployments.ray_guard.watchdog import Watchdog

HEAD = ("gcs_server", "raylet")
"""Ray's names of the processes of the head node that are not restarted when they end."""


class RayGuard:
    """Ends this process if a process of Ray's head ends, and all processes of the session once this process is gone.

    Args:
        session: folder of the Ray session.
        processes: Ray's processes of this node, by name.
    """

    def __init__(self, session: str, processes: Mapping[str, Sequence[Any]]) -> None:
        self._watchdog = Watchdog(Path(session))
        head = [info.process.pid for kind in HEAD for info in processes.get(kind, ())]
        self._head_watch = HeadWatch([PeerProcess(pid, process_start(pid)) for pid in head], _leave)

    @property
    def pid(self) -> int:
        """Id of the guard's own process, which must outlive the others."""
        return self._watchdog.pid

    def stand_down(self) -> None:
        """Stops watching the head; called before the cluster is ended."""
        self._head_watch.close()

    def close(self) -> None:
        """Ends the guard's process; must be called only when no processes of the session are left."""
        self._watchdog.close()


def _leave() -> None:
    # The watchdog is not ended here, because it ends orphaned children of the raylet once this process is gone.
    print("Error: a process of Ray's head has ended, so the application has stopped: start it again", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
