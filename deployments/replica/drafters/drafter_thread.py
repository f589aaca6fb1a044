"""The thread of a drafter's process that loads the drafter and answers rounds. This module does not use Ray."""

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
from wingbeat.deployments.parts import first_result, hooks
from wingbeat.deployments.replica.engine.build import build_draft_worker
from wingbeat.deployments.replica.engine.engine_setup import DrafterTerms
from wingbeat.deployments.replica.engine.factories import load_factory
from wingbeat.deployments.replica.engine.pair_channel import OWN_DEVICE, attach_channel
from wingbeat.runtime import parts as runtime_parts
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.verifier.loading.mapped_files import give_back_freed

logger = logging.getLogger(__name__)
LOADED_POLL_S = 1.0
REST_S = 1.0
"""Maximum seconds to wait for the running pass to end; `wingbeat.cluster.fork_server` kills a process that takes
longer.
"""
WAIT_S = 0.1
"""Maximum seconds of one wait for a round. A verifier that sends a round also rings the channel's doorbell, which ends
the wait at once.
"""


class Worker(Protocol):
    """Interface of a worker that serves one verifier (`DraftWorker`) or several."""

    drafter: Any

    def attach(self, name: str, end: DrafterEnd) -> None: ...
    def detach(self, name: str) -> None: ...

    @property
    def ends(self) -> list[DrafterSide]: ...

    @property
    def names(self) -> list[str]: ...

    def run_once(self) -> bool: ...


class DrafterThread:
    """Answers the rounds of all attached channels; all pending rounds are computed in one batched pass.

    The thread first loads the drafter. Each method call waits until the drafter is loaded; if loading fails, each call
    raises the error of the loading.

    Args:
        core: CPU core that the thread shares with the verifier's thread; None does not pin the thread.
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
        self._borrowed = first_result("borrow", config, OWN_DEVICE)
        self._thread = threading.Thread(target=self._run, name="wingbeat-drafter", daemon=True)
        self._thread.start()

    def needs(self, terms: DrafterTerms = DrafterTerms()) -> DrafterNeeds:
        """Return the requirements of this drafter that its verifier must meet.

        Args:
            terms: contains the convention by which the draft head is read, which is fixed before any channel is
                attached, the weights that the drafter borrows from the verifier, and where it finds newer weights.

        Raises:
            ValueError: the draft head cannot be read by this convention.
        """
        worker = self.worker(terms.loan)
        self._read_as(terms.convention)
        if terms.rows is not None:
            runtime_parts.first_result("follow_rows", terms.rows, worker)
        needs = worker.drafter.needs
        if self._config.drafter_device() == "cuda":
            torch.cuda.empty_cache()  # frees memory that loading has left in torch's cache
            needs = needs._replace(held_bytes=torch.cuda.memory_reserved())
        return needs

    def attach(self, name: ChannelName, incarnation: int, convention: HeadConvention | None = None) -> None:
        """Serve the channel `name` from now on.

        Args:
            convention: as in the `terms` of `needs`.

        Raises:
            ChannelError: the channel does not exist, `incarnation` is not higher than the number of the last attached
                drafter, or the GPU of this process cannot access the channel's memory.
            ValueError: the drafter has been set up for other verifiers in a way that does not suit this verifier, or
                has no memory for another verifier.
        """
        self.worker()
        with self._lock:
            self._read_as(convention)
            end = attach_channel(name, incarnation, self._config.drafter_device() == "cuda")
            try:
                self._worker.detach(name)  # the channel may still be attached through an earlier connection that broke
                self._worker.attach(name, end)
            except BaseException:
                end.close()
                raise
        self._attached.set()

    def detach(self, name: ChannelName) -> None:
        """Stop serving the channel `name`; does nothing if the channel is not attached."""
        worker = self.worker()
        with self._lock:
            worker.detach(name)

    def rest(self) -> None:
        """Begin no further pass, and wait for the running pass and for the device; this must be the last call of this
        object.

        The wait is limited to `REST_S`, so that a stuck thread does not hold up the caller.
        """
        if self._lock.acquire(timeout=REST_S) and self._config.drafter_device() == "cuda":
            torch.cuda.synchronize()

    def channels(self) -> list[str]:
        """Return the names of the served channels, in the order in which the channels were attached."""
        return self.worker().names

    @property
    def silent_s(self) -> float:
        """Seconds since the thread last checked whether a round is pending."""
        return time.monotonic() - self._turned_at

    def worker(self, loan: Any = None) -> Worker:
        """Wait until the drafter is loaded, then return its worker.

        Args:
            loan: weights that the verifier lends; used in the first call, ignored in later calls.

        Raises:
            Exception: whatever the drafter's factory has raised, such as a checkpoint error that names the tensor.
        """
        if self._borrowed is not None:
            self._borrowed.tell(loan)
        # The total wait has no limit here, because the actor limits the time of loading. The loop also ends if the
        # loading thread has died, because `_loaded` would then never be set.
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
        """Load the drafter; returns whether that succeeded.

        The drafter is loaded in the thread that drafts, because torch's intra-op threads belong to the thread that
        starts them.
        """
        try:
            torch.set_num_threads(self._config.num_threads() or 1)
            torch.set_flush_denormal(True)
            factory = self._config.drafter_factory
            build = load_factory(factory) if factory else partial(build_draft_worker, lender=self._borrowed)
            worker = build(self._config)
            give_back_freed()
            if not self._config.num_threads() and worker.drafter.device.type == "cpu":
                worker.most_threads = len(os.sched_getaffinity(0))
            self._worker = first_result("shared_worker", self._config, worker) or worker
        except Exception as error:
            self._problem = error
        self._loaded.set()
        return self._problem is None

    def _run(self) -> None:
        """Answer rounds until the process ends.

        A failure ends the process, because the verifier notices a dead process at once, while a drafter in an unknown
        state could go on proposing wrong drafts.
        """
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
            # a pending round waits for data on the device, and no doorbell rings when such data arrives
            time.sleep(POLL_NAP_S)
        else:
            waits[0]([end.bell for end in ends], lambda: any(end.round_waits() for end in ends), WAIT_S, self._busy_at)
