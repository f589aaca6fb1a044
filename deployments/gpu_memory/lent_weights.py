"""Weights of a verifier that its drafter, a process on the same GPU, reads in place of copies of its own.

A head whose files have no embedding (and no output matrix) uses the verifier's. Its process begins before the verifier
is there, so it loads until it needs them, and waits to be told what is lent (`DrafterTerms`).
"""

import logging
import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wingbeat.cluster.channels.cuda.cuda_ipc import KIND as CUDA_IPC
from wingbeat.cluster.channels.cuda.cuda_runtime import CudaRuntime
from wingbeat.cluster.channels.cuda.lent_memory import Borrower, Loan, lend
from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.heads.lendable import lendable

if TYPE_CHECKING:
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

logger = logging.getLogger(__name__)


def may_lend(config: AppConfig) -> bool:
    """Whether a verifier and its own drafter are to share one GPU and a channel through its memory."""
    ours = config.engine_factory is None and config.drafter_factory is None and config.engine_dir is None
    if not (ours and config.has_own_drafter() and config.choice().has_weights and config.drafter_device() == "cuda"):
        return False
    return config.channel_kind() == CUDA_IPC and config.engine_config().drafter_beside


def loan_of(
    config: AppConfig, loaded: "LoadedModel", device: torch.device, runtime: CudaRuntime | None = None
) -> Loan | None:
    """The loan of a verifier to its drafter; None where the drafter is not beside it.

    Args:
        loaded: on the device, where its weights stay.
        runtime: of CUDA; None takes torch's.
    """
    if not may_lend(config):
        return None
    weights = lendable(loaded, getattr(torch, config.resolved_dtype()))
    if config.num_ranks() > 1:
        weights = dict.fromkeys(weights, f"it is divided among {config.num_ranks()} ranks")
    return lend(weights, device, runtime)


class BorrowedWeights:
    """From a weight's name to the verifier's own: the drafter's `Lender`, called by the thread that loads it.

    Args:
        device: of the drafter.
        patience_s: until it is said what is lent; a verifier that has not started by then is killed.
        runtime: of CUDA; None takes torch's.
    """

    def __init__(self, device: torch.device, patience_s: float, runtime: CudaRuntime | None = None) -> None:
        self._device, self._patience_s, self._runtime = device, patience_s, runtime
        self._told = threading.Event()
        self._loan: Loan | None = None
        self._borrower: Borrower | None = None

    def tell(self, loan: Loan | None) -> None:
        """Say what is lent; the first word counts, because the drafter loads by it."""
        if not self._told.is_set():
            self._loan = loan
            self._told.set()

    def __call__(self, name: str) -> Tensor | None:
        """The weight, mapped, once it is said what is lent; None where the drafter loads its own, for which one line
        gives the reason unless it is on another GPU."""
        if not self._told.wait(self._patience_s):
            self.tell(None)
        if self._loan is None:
            return None
        try:
            self._borrower = self._borrower or Borrower(self._loan, self._device, self._runtime)
            return self._borrower.tensor(name) if self._borrower.is_beside else None
        except RuntimeError as error:  # of CUDA, or torch's of a device that is not well
            reason = str(error).partition("\n")[0]
            logger.warning("the drafter loads a copy of its own of the verifier's %s: %s", name, reason)
            return None


def borrow(config: AppConfig, device: torch.device) -> BorrowedWeights | None:
    """Weights of a drafter's verifier, once the drafter is told of them; None where the two share no GPU."""
    return BorrowedWeights(device, config.engine_start_timeout_s) if may_lend(config) else None
