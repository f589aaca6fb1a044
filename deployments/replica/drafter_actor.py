"""The drafter's process: a Ray actor beside its verifier whose thread answers rounds; knows nothing of requests."""

import logging
import os
import threading
from typing import Any, Protocol

import torch

from wingbeat.cluster.channels.channel import DrafterSide
from wingbeat.cluster.cores import pin_thread
from wingbeat.cluster.placement import claim_devices
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.log import show_log
from wingbeat.deployments.replica.build import attach_channel, build_draft_worker, load_factory
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.protocol.ends import DrafterEnd

logger = logging.getLogger(__name__)
WAIT_S = 0.1
"""Longest wait for a round; within it the doorbell wakes the thread at once."""
SHARED_WAIT_S = 0.3e-3
"""With several channels the thread listens to one at a time, so a round of another one waits up to this long."""


class Worker(Protocol):
    """What the actor needs of `runtime.drafters.worker.DraftWorker`."""

    drafter: Any

    def attach(self, name: str, end: DrafterEnd) -> None: ...
    def detach(self, name: str) -> None: ...

    @property
    def ends(self) -> list[DrafterSide]: ...

    def run_once(self) -> bool: ...


class DrafterActor:
    """Answers the rounds of every channel attached to it, all that are pending in one batched pass.

    It is never restarted in place: a new actor under a new incarnation takes over the channels.

    Args:
        core: CPU core its thread shares with the verifier's; None leaves it free.
        convention: how to read a head whose files leave that open, where it is settled already.

    Raises:
        Exception: whatever the drafter's factory raises, such as a checkpoint error that names the tensor.
    """

    def __init__(self, config: AppConfig, core: int | None = None, convention: HeadConvention | None = None) -> None:
        show_log()
        if config.num_gpus_per_drafter > 0:
            claim_devices()
        torch.set_num_threads(config.threads)
        self._config = config
        self._core = core
        logger.info("loading the drafter %s", config.choice().label)
        build = load_factory(config.drafter_factory) if config.drafter_factory else build_draft_worker
        self._worker: Worker = build(config)
        if convention is not None:
            self._worker.drafter.read_as(convention)
        self._lock = threading.Lock()
        self._attached = threading.Event()
        threading.Thread(target=self._run, name="wingbeat-drafter", daemon=True).start()

    def pid(self) -> int:
        """The operating system's id of this process."""
        return os.getpid()

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

    def attach(self, name: str, incarnation: int) -> None:
        """Serve the channel `name` from now on.

        Raises:
            ChannelError: there is no such channel, a later incarnation holds it, or this GPU cannot reach its memory.
        """
        end = attach_channel(self._config, name, incarnation)
        with self._lock:
            self._worker.attach(name, end)
        self._attached.set()

    def detach(self, name: str) -> None:
        """Leave the channel `name`; harmless when it is not attached."""
        with self._lock:
            self._worker.detach(name)

    def _run(self) -> None:
        """Answer rounds until the process ends. A failure ends the process: the verifier sees that at once, while a
        drafter of unknown state could go on proposing nonsense."""
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
