"""The thread of a drafter's process that loads the drafter and answers rounds; knows nothing of Ray."""

import logging
import os
import threading
import time
from typing import Any, Protocol

import torch

from wingbeat.cluster.channels.any_bell import wait_for_any
from wingbeat.cluster.channels.channel import DrafterSide
from wingbeat.cluster.channels.doorbell import POLL_NAP_S
from wingbeat.cluster.channels.tcp.remote_address import ChannelName
from wingbeat.cluster.cores import pin_thread
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.engine.build import build_draft_worker, draft_room
from wingbeat.deployments.replica.engine.factories import load_factory
from wingbeat.deployments.replica.engine.pair_channel import attach_channel
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.protocol.ends import DrafterEnd

logger = logging.getLogger(__name__)
LOADED_POLL_S = 1.0
REST_S = 1.0
"""For the pass that runs to end; `wingbeat.cluster.fork_server` kills a process that takes longer."""
WAIT_S = 0.1
"""Longest wait for a round; within it the doorbell wakes the thread at once."""


class Worker(Protocol):
    """What the thread needs of `runtime.drafters.worker.DraftWorker`."""

    drafter: Any
    room: Any

    def attach(self, name: str, end: DrafterEnd) -> None: ...
    def detach(self, name: str) -> None: ...

    @property
    def ends(self) -> list[DrafterSide]: ...

    @property
    def names(self) -> list[str]: ...

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
        self._busy_at = 0.0
        self._turned_at = time.monotonic()
        self._convention: HeadConvention | None = None
        thread = threading.Thread(target=self._run, name="wingbeat-drafter", daemon=True)
        thread.start()
        # Its actor knows how long that may take; a thread that has ended without a word will not say one.
        while not self._loaded.wait(LOADED_POLL_S) and thread.is_alive():
            pass
        if self._worker is None and self._problem is None:
            raise RuntimeError("the drafter's thread has ended while it was loading")
        if self._problem is not None:
            raise self._problem

    def needs(self, convention: HeadConvention | None = None) -> DrafterNeeds:
        """What this drafter needs of its verifier.

        Args:
            convention: settles how its head is read, before it is attached anywhere.

        Raises:
            ValueError: its head cannot be read so.
        """
        self._read_as(convention)
        needs = self._worker.drafter.needs
        if self._config.drafter_device() == "cuda":
            needs = needs._replace(held_bytes=torch.cuda.memory_reserved())
        return needs

    def attach(self, name: ChannelName, incarnation: int, convention: HeadConvention | None = None) -> None:
        """Serve the channel `name` from now on.

        Args:
            convention: as for `needs`.

        Raises:
            ChannelError: there is no such channel, a later incarnation holds it, or this GPU cannot reach its memory.
            NoRoomError: it does not fit beside the verifiers that are served already.
            ValueError: the drafter suits those and not this one.
        """
        with self._lock:
            self._read_as(convention)
            end = attach_channel(name, incarnation, self._config.drafter_device() == "cuda")
            try:
                self._worker.detach(name)  # a connection that broke
                self._worker.attach(name, end)
            except BaseException:
                end.close()
                raise
        self._attached.set()

    def detach(self, name: ChannelName) -> None:
        """Leave the channel `name`; harmless when it is not attached."""
        with self._lock:
            self._worker.detach(name)

    def rest(self) -> None:
        """Begin no further pass, and wait for the one that runs and for the device; the last call.

        A thread that is stuck is not waited for: whoever asked has a limit of its own.
        """
        if self._lock.acquire(timeout=REST_S) and self._config.drafter_device() == "cuda":
            torch.cuda.synchronize()

    def channels(self) -> list[str]:
        """The channels that are served, in the order in which they came."""
        return self._worker.names

    @property
    def silent_s(self) -> float:
        """How long ago the thread last looked for a round."""
        return time.monotonic() - self._turned_at

    def _read_as(self, convention: HeadConvention | None) -> None:
        if convention in (None, self._convention):
            return
        if self._convention is not None:
            raise ValueError(f"the drafter reads its head as {self._convention}, and {convention} is asked for")
        self._worker.drafter.read_as(convention)
        self._convention = convention

    def _load(self) -> bool:
        """Load in the thread that is to draft: the threads that torch starts below it are then the same."""
        try:
            torch.set_num_threads(self._config.threads or 1)
            factory = self._config.drafter_factory
            self._worker = (load_factory(factory) if factory else build_draft_worker)(self._config)
            if self._config.drafters is not None:
                self._worker.room = draft_room(self._config, self._worker.drafter.device)
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
            self._turned_at = time.monotonic()
            answered = self._worker.run_once()
        if answered:
            self._busy_at = time.monotonic()
        return answered

    def _wait_for_round(self) -> None:
        self._attached.clear()
        with self._lock:
            ends = self._worker.ends
        if not ends:
            self._attached.wait(WAIT_S)
        elif len(ends) == 1:
            ends[0].wait_outcome(WAIT_S)
        elif any(end.round_waits() for end in ends):
            time.sleep(POLL_NAP_S)  # its device is not there yet, which no bell announces
        else:
            wait_for_any(
                [end.bell for end in ends], lambda: any(end.round_waits() for end in ends), WAIT_S, self._busy_at
            )
