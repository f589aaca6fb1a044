"""The Muon optimizer, and the choice of an optimizer for each parameter."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from wingbeat.runtime.number_formats import has_bfloat16_units

_WEIGHT_DECAY = 0.05
"""Weight decay of the matrices that Muon trains."""
_NO_LAYERS = ("embed", "lm_head", "markov_w", "confidence", "codebook", "key_norms")
"""Substrings of the names of matrices that AdamW trains instead of Muon: per-token tables, output layers and stacked
norms.
"""
_MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration, chosen for a large slope at 0."""
_ITERATIONS = 5


def fast_dtype(device: torch.device) -> torch.dtype:
    """The dtype of matrix products on a device: bfloat16 if the hardware supports it, else float32.

    The choice depends on hardware features, not on timing, because a resumed run must compute the same bits, and a
    second timing could select another dtype.
    """
    return torch.bfloat16 if device.type != "cpu" or has_bfloat16_units() else torch.float32


def build_optimizers(model: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers; AdamW for embeddings, the output head, biases and norms."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    is_matrix = {name: p.ndim == 2 and not any(part in name for part in _NO_LAYERS) for name, p in trained.items()}
    matrices = [p for name, p in trained.items() if is_matrix[name]]
    others = [p for name, p in trained.items() if not is_matrix[name]]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, learning_rate, _WEIGHT_DECAY, fast_dtype(matrices[0].device)))
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
    return optimizers


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised steps. The steps are scaled to the RMS of AdamW's steps, so that both optimizers use
    the same learning rate.

    This class exists because torch's own Muon always computes in bfloat16, which on a CPU without bfloat16 units takes
    30 times as long as float32. Source: K. Jordan, "Muon: an optimizer for hidden layers" (2024); the scale is from
    Moonlight (arXiv 2502.16982).

    Args:
        parameters: matrices.
        learning_rate: step size.
        weight_decay: decay per unit of learning rate.
        dtype: dtype of the matrix products that orthogonalise a step.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float, dtype: torch.dtype
    ) -> None:
        super().__init__(parameters, {"lr": learning_rate, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - _MOMENTUM)
                step = orthogonal(matrix.grad.lerp(momentum, _MOMENTUM), self.dtype)
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(step, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximately orthogonalise a matrix by Newton-Schulz iteration; its singular values end between 0.7 and 1.2."""
    a, b, c = _NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(dtype)
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
