"""The thread of a drafter's process that loads the drafter and answers rounds; knows nothing of Ray."""

import logging
import os
import threading
from typing import Any, Protocol

import torch

from wingbeat.cluster.channels.channel import DrafterSide
from wingbeat.cluster.channels.remote_address import ChannelName
from wingbeat.cluster.cores import pin_thread
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.build import build_draft_worker
from wingbeat.deployments.replica.factories import load_factory
from wingbeat.deployments.replica.pair_channel import attach_channel
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.protocol.ends import DrafterEnd

logger = logging.getLogger(__name__)
WAIT_S = 0.1
"""Longest wait for a round; within it the doorbell wakes the thread at once."""
SHARED_WAIT_S = 0.3e-3
"""With several channels the thread listens to one at a time, so a round of another one waits up to this long."""


class Worker(Protocol):
    """What the thread needs of `runtime.drafters.worker.DraftWorker`."""

    drafter: Any

    def attach(self, name: str, end: DrafterEnd) -> None: ...
    def detach(self, name: str) -> None: ...

    @property
    def ends(self) -> list[DrafterSide]: ...

    def run_once(self) -> bool: ...


class DrafterThread:
    """Answers the rounds of every channel attached to it, all that are pending in one batched pass.

    Args:
        core: CPU core the thread shares with the verifier's; None leaves it free.

    Raises:
        Exception: whatever the drafter's factory raises, such as a checkpoint error that names the tensor.
    """

    def __init__(self, config: AppConfig, core: int | None = None) -> None:
        self._config = config
        self._core = core
        self._worker: Worker | None = None
        self._problem: Exception | None = None
        self._loaded = threading.Event()
        self._lock = threading.Lock()
        self._attached = threading.Event()
        threading.Thread(target=self._run, name="wingbeat-drafter", daemon=True).start()
        self._loaded.wait()
        if self._problem is not None:
            raise self._problem

    def needs(self, convention: HeadConvention | None = None) -> DrafterNeeds:
        """What this drafter needs of its verifier.

        Args:
            convention: settles how its head is read, before it is attached anywhere.

        Raises:
            ValueError: its head cannot be read so.
        """
        if convention is not None:
            self._worker.drafter.read_as(convention)
        needs = self._worker.drafter.needs
        if self._config.drafter_device() == "cuda":
            needs = needs._replace(held_bytes=torch.cuda.memory_reserved())
        return needs

    def attach(self, name: ChannelName, incarnation: int) -> None:
        """Serve the channel `name` from now on.

        Raises:
            ChannelError: there is no such channel, a later incarnation holds it, or this GPU cannot reach its memory.
        """
        end = attach_channel(self._config, name, incarnation)
        with self._lock:
            self._worker.detach(name)  # a connection that broke
            self._worker.attach(name, end)
        self._attached.set()

    def detach(self, name: ChannelName) -> None:
        """Leave the channel `name`; harmless when it is not attached."""
        with self._lock:
            self._worker.detach(name)

    def _load(self) -> bool:
        """Load in the thread that is to draft: the threads that torch starts below it are then the same."""
        try:
            torch.set_num_threads(self._config.threads or 1)
            factory = self._config.drafter_factory
            self._worker = (load_factory(factory) if factory else build_draft_worker)(self._config)
        except Exception as error:
            self._problem = error
        self._loaded.set()
        return self._problem is None

    def _run(self) -> None:
        """Answer rounds until the process ends. A failure ends the process: the verifier sees that at once, while a
        drafter of unknown state could go on proposing nonsense."""
        if not self._load():
            return
        try:
            if self._core is not None:
                pin_thread(self._core)
            while True:
                if not self._run_once():
                    self._wait_for_round()
        except Exception:
            logger.exception("The drafter failed")
            logging.shutdown()
            os._exit(1)

    def _run_once(self) -> bool:
        with self._lock:
            return self._worker.run_once()

    def _wait_for_round(self) -> None:
        self._attached.clear()
        with self._lock:
            ends = self._worker.ends
        if not ends:
            self._attached.wait(WAIT_S)
        for end in ends:
            end.wait_outcome(WAIT_S if len(ends) == 1 else SHARED_WAIT_S)
