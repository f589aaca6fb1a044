"""Lends a verifier's weights to its drafter's process on the same GPU, which maps the weights instead of loading
copies.

A draft head whose files lack an embedding (or an output matrix) uses the verifier's embedding (or output matrix). The
drafter's process starts before the verifier is loaded. Therefore it first loads its own weights, and waits for the loan
(in `DrafterTerms`) when it needs the verifier's weights.
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
    """Return whether a verifier and its own drafter share one GPU, and communicate through a channel in the GPU's
    memory.
    """
    ours = config.engine_factory is None and config.drafter_factory is None and config.engine_dir is None
    if not (ours and config.has_own_drafter() and config.choice().has_weights and config.drafter_device() == "cuda"):
        return False
    return config.channel_kind() == CUDA_IPC and config.engine_config().drafter_beside


def loan_of(
    config: AppConfig, loaded: "LoadedModel", device: torch.device, runtime: CudaRuntime | None = None
) -> Loan | None:
    """Return the loan of a verifier to its drafter; None if the two do not share a GPU.

    Args:
        loaded: model on the device. Its weights must stay at their addresses.
        runtime: CUDA runtime; with None, torch's runtime is used.
    """
    if not may_lend(config):
        return None
    weights = lendable(loaded, getattr(torch, config.resolved_dtype()))
    if config.num_ranks() > 1:
        weights = dict.fromkeys(weights, f"it is divided among {config.num_ranks()} ranks")
    return lend(weights, device, runtime)


class BorrowedWeights:
    """The drafter's `Lender`: returns the verifier's tensor for a weight's name. The object is called by the thread
    that loads the drafter.

    Args:
        device: the drafter's device.
        patience_s: maximum seconds to wait for the loan. By then a verifier has started or has been killed.
        runtime: CUDA runtime; with None, torch's runtime is used.
    """

    def __init__(self, device: torch.device, patience_s: float, runtime: CudaRuntime | None = None) -> None:
        self._device, self._patience_s, self._runtime = device, patience_s, runtime
        self._told = threading.Event()
        self._loan: Loan | None = None
        self._borrower: Borrower | None = None

    def tell(self, loan: Loan | None) -> None:
        """Set the loan; later calls are ignored, because the drafter is loaded with the loan of the first call."""
        if not self._told.is_set():
            self._loan = loan
            self._told.set()

    def __call__(self, name: str) -> Tensor | None:
        """Wait for the loan, then map the verifier's weight and return it.

        Returns None if there is no loan, the verifier is on another GPU, or mapping fails. The drafter then loads its
        own copy. Only a failure to map is logged.
        """
        if not self._told.wait(self._patience_s):
            self.tell(None)
        if self._loan is None:
            return None
        try:
            self._borrower = self._borrower or Borrower(self._loan, self._device, self._runtime)
            return self._borrower.tensor(name) if self._borrower.is_beside else None
        except RuntimeError as error:  # CUDA's error, or torch's error for a faulty device
            reason = str(error).partition("\n")[0]
            logger.warning("the drafter loads its own copy of the verifier's %s: %s", name, reason)
            return None


def borrow(config: AppConfig, device: torch.device) -> BorrowedWeights | None:
    """Return the weights that a drafter borrows from its verifier; None if the two do not share a GPU."""
    return BorrowedWeights(device, config.engine_start_timeout_s) if may_lend(config) else None
