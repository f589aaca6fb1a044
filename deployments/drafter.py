"""The drafter's process: a Ray actor beside its verifier whose thread answers rounds; knows nothing of requests."""

import logging
import os
import threading
import time
from typing import Protocol

import torch

from wingbeat.cluster.doorbell import IDLE_NAP_S, Doorbell
from wingbeat.cluster.shm import ShmChannel
from wingbeat.deployments.config import AppConfig
from wingbeat.deployments.factories import load_factory
from wingbeat.runtime.link import DrafterEnd

logger = logging.getLogger(__name__)
ROUNDS_APART_S = 1.0
"""Longer than any round: a drafter that had no work for this long may sleep deeper between looks."""
WAIT_S = 0.1
"""An attachment waits at most this long for the thread to let go of the worker."""


class Worker(Protocol):
    """What the actor needs of `runtime.draft_worker.DraftWorker`."""

    def attach(self, name: str, end: DrafterEnd) -> None: ...
    def detach(self, name: str) -> None: ...
    def run_once(self) -> bool: ...


class DrafterActor:
    """Answers the rounds of every channel attached to it, all that are pending in one batched pass.

    It is never restarted in place: a new actor under a new incarnation takes over the channels.

    Raises:
        Exception: whatever the drafter's factory raises, such as a checkpoint error that names the tensor.
    """

    def __init__(self, config: AppConfig) -> None:
        torch.set_num_threads(config.threads)
        self._worker: Worker = load_factory(config.drafter_factory)(config)
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._changed = threading.Event()
        threading.Thread(target=self._run, name="wingbeat-drafter", daemon=True).start()

    def pid(self) -> int:
        """The operating system's id of this process."""
        return os.getpid()

    def attach(self, name: str, incarnation: int) -> None:
        """Serve the channel `name` from now on.

        Raises:
            ChannelError: there is no such channel, or a later incarnation holds it.
        """
        end = ShmChannel.attach(name, incarnation)
        with self._lock:
            self._worker.attach(name, end)
            self._names.add(name)
        self._changed.set()

    def detach(self, name: str) -> None:
        """Leave the channel `name`; harmless when it is not attached."""
        with self._lock:
            if name in self._names:
                self._names.discard(name)
                self._worker.detach(name)

    def _run(self) -> None:
        """Answer rounds until the process ends. A failure ends the process: the verifier sees that at once, while a
        drafter of unknown state could go on proposing nonsense."""
        in_rounds, idle = Doorbell(), Doorbell(IDLE_NAP_S)
        worked_at = time.monotonic()
        try:
            while True:
                if not self._names:
                    self._changed.wait()
                    self._changed.clear()
                doorbell = in_rounds if time.monotonic() - worked_at < ROUNDS_APART_S else idle
                if doorbell.wait(self._run_once, WAIT_S, quiet_since=worked_at):
                    worked_at = time.monotonic()
        except Exception:
            logger.exception("The drafter failed")
            logging.shutdown()
            os._exit(1)

    def _run_once(self) -> bool:
        with self._lock:
            return self._worker.run_once()
