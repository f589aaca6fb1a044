"""The channel through GPU memory, and weights lent beside it, which are imported where they are asked for."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from wingbeat.cluster.channels.cuda.cuda_ipc import CudaIpcChannel
    from wingbeat.cluster.channels.cuda.lent_memory import Loan
    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.gpu_memory.lent_weights import BorrowedWeights

try_device_channel = "wingbeat.cluster.channels.cuda.ipc_trial:try_cuda_ipc"


def device_channel() -> "type[CudaIpcChannel]":
    """The kind of channel that two processes with GPUs meet in."""
    from wingbeat.cluster.channels.cuda.cuda_ipc import CudaIpcChannel

    return CudaIpcChannel


def lend(config: "AppConfig", loaded: Any, device: "torch.device") -> "Loan | None":
    """Weights of a loaded verifier that its drafter need not have; None where that is not beside it."""
    from wingbeat.deployments.gpu_memory.lent_weights import loan_of

    return loan_of(config, loaded, device)


def borrow(config: "AppConfig", device: "torch.device") -> "BorrowedWeights | None":
    """Weights of a drafter's verifier, once the drafter is told of them; None where the two share no GPU."""
    from wingbeat.deployments.gpu_memory.lent_weights import BorrowedWeights, may_lend

    return BorrowedWeights(device, config.engine_start_timeout_s) if may_lend(config) else None
