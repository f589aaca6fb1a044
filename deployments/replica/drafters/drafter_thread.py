"""The thread of a drafter's process that loads the drafter and answers rounds; knows nothing of Ray."""

import logging
import os
import threading
import time
from functools import partial
from typing import Any, Protocol

import torch

from wingbeat.cluster.channels.channel import DrafterSide
from wingbeat.cluster.channels.doorbell import POLL_NAP_S
from wingbeat.cluster.channels.header import ChannelName
from wingbeat.cluster.cores import pin_thread
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.parts import first, hooks
from wingbeat.deployments.replica.engine.build import build_draft_worker
from wingbeat.deployments.replica.engine.engine_setup import DrafterTerms
from wingbeat.deployments.replica.engine.factories import load_factory
from wingbeat.deployments.replica.engine.pair_channel import OWN_DEVICE, attach_channel
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.verifier.loading.mapped_files import give_back_freed

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

    It loads the drafter first, for which every call waits, and which any of them may raise.

    Args:
        core: CPU core the thread shares with the verifier's; None leaves it free.
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
        self._borrowed = first("borrow", config, OWN_DEVICE)
        self._thread = threading.Thread(target=self._run, name="wingbeat-drafter", daemon=True)
        self._thread.start()

    def needs(self, terms: DrafterTerms = DrafterTerms()) -> DrafterNeeds:
        """What this drafter needs of its verifier.

        Args:
            terms: settle how its head is read, before it is attached anywhere, and which weights it need not have.

        Raises:
            ValueError: its head cannot be read so.
        """
        worker = self.worker(terms.loan)
        self._read_as(terms.convention)
        needs = worker.drafter.needs
        if self._config.drafter_device() == "cuda":
            torch.cuda.empty_cache()  # what loading has left
            needs = needs._replace(held_bytes=torch.cuda.memory_reserved())
        return needs

    def attach(self, name: ChannelName, incarnation: int, convention: HeadConvention | None = None) -> None:
        """Serve the channel `name` from now on.

        Args:
            convention: as for `needs`.

        Raises:
            ChannelError: there is no such channel, a later incarnation holds it, or this GPU cannot reach its memory.
            ValueError: the drafter suits the verifiers that are served already and not this one, or has no room for it.
        """
        self.worker()
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
        worker = self.worker()
        with self._lock:
            worker.detach(name)

    def rest(self) -> None:
        """Begin no further pass, and wait for the one that runs and for the device; the last call.

        A thread that is stuck is not waited for: whoever asked has a limit of its own.
        """
        if self._lock.acquire(timeout=REST_S) and self._config.drafter_device() == "cuda":
            torch.cuda.synchronize()

    def channels(self) -> list[str]:
        """The channels that are served, in the order in which they came."""
        return self.worker().names

    @property
    def silent_s(self) -> float:
        """How long ago the thread last looked for a round."""
        return time.monotonic() - self._turned_at

    def worker(self, loan: Any = None) -> Worker:
        """What drafts, once it is loaded; with what is lent, as the first call has it.

        Raises:
            Exception: whatever the drafter's factory has raised, such as a checkpoint error that names the tensor.
        """
        if self._borrowed is not None:
            self._borrowed.tell(loan)
        # Its actor knows how long that may take; a thread that has ended without a word will not say one.
        while not self._loaded.wait(LOADED_POLL_S) and self._thread.is_alive():
            pass
        if self._problem is not None:
            raise self._problem
        if self._worker is None:
            raise RuntimeError("the drafter's thread has ended while it was loading")
        return self._worker

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
            torch.set_num_threads(self._config.num_threads() or 1)
            factory = self._config.drafter_factory
            build = load_factory(factory) if factory else partial(build_draft_worker, lender=self._borrowed)
            self._worker = build(self._config)
            give_back_freed()
            if not self._config.num_threads() and self._worker.drafter.device.type == "cpu":
                self._worker.most_threads = len(os.sched_getaffinity(0))
        except Exception as error:
            self._problem = error
        self._loaded.set()
        return self._problem is None

    def _run(self) -> None:
        """Answer rounds until the process ends. A failure ends the process: the verifier sees that at once, while a
        drafter of unknown state could go on proposing nonsense."""
        if not self._load():
            return
        logger.info("the drafter %s of %s is loaded", self._config.choice().label, self._config.model_name())
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
        elif any(end.round_waits() for end in ends) or not (waits := hooks("wait_for_any")):
            time.sleep(POLL_NAP_S)  # its device is not there yet, which no bell announces
        else:
            waits[0]([end.bell for end in ends], lambda: any(end.round_waits() for end in ends), WAIT_S, self._busy_at)
