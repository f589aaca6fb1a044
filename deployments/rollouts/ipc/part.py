"""Hook of weights in a trainer's GPU memory. The implementation is imported only when such weights arrive."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor


def shared_tensors(
    info: Mapping[str, Any], device: "torch.device", check: "Callable[[str, tuple[int, ...], torch.dtype], object]"
) -> "AbstractContextManager[dict[str, Tensor]] | None":
    """Return a context manager of the tensors that `update_info` names by IPC handles; None if it names none."""
    if "ipc_handles" not in info:
        return None
    from wingbeat.deployments.rollouts.ipc.handles import opened

    return opened(info, device, check)
