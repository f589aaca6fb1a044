"""Root-mean-square norms of a loaded model as one operation each, where that gives the same bits.

transformers writes such a norm as five operations, and a small batch takes as long as it has operations. Nothing is
assumed about a class: each one is held against torch's own norm on numbers of its own size first.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

_NUM_ROWS = 7
_EPS_NAMES = ("variance_epsilon", "eps")


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> int:
    """Let the norms of a model run as `torch.nn.functional.rms_norm` where nothing changes; returns how many do."""
    num_fused = 0
    for module in model.modules():
        kind, weight = type(module), getattr(module, "weight", None)
        eps_name = next((name for name in _EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
        if not kind.__name__.endswith("RMSNorm") or kind is nn.RMSNorm or eps_name is None:
            continue
        if isinstance(weight, nn.Parameter) and weight.ndim == 1 and _same(module, getattr(module, eps_name)):
            module.__class__ = _fused(kind, eps_name)
            num_fused += 1
    return num_fused


def _same(module: nn.Module, eps: float) -> bool:
    weight = module.weight
    rows = torch.randn(_NUM_ROWS, len(weight), generator=torch.Generator().manual_seed(0))
    # From very small to large: an epsilon of another place shows at one end, a cast of another place at the other.
    rows = (rows * torch.logspace(-4, 3, _NUM_ROWS)[:, None]).to(weight.device, weight.dtype)
    return torch.equal(module(rows), functional.rms_norm(rows, weight.shape, weight, eps))


@cache
def _fused(kind: type[nn.Module], eps_name: str) -> type[nn.Module]:
    """The same module with another forward: weights, names and copies of it stay what they are."""

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        weight = self._parameters["weight"]  # looked up by name, a parameter is slow to find
        return torch.rms_norm(hidden_states, weight.shape, weight, self.__dict__[eps_name])

    return type(kind.__name__, (kind,), {"forward": forward})
