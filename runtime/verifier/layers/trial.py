"""Rows and tolerances with which replaced parts of a model are compared with transformers' modules at load."""

import torch
from torch import Tensor

NUM_ROWS = 7
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest distance of a row from the original row, relative to the original row's norm, by dtype."""


def drawn_rows(size: int, like: Tensor, magnitudes: tuple[float, float] = (-3, 2)) -> Tensor:
    """Returns random rows [NUM_ROWS, size] of increasing magnitude, like a tensor's dtype and device.

    With such rows, an epsilon added at another point of the computation changes the result.

    Args:
        magnitudes: decimal logarithms of the first and the last row's.
    """
    rows = torch.randn(NUM_ROWS, size, generator=torch.Generator().manual_seed(0))
    return (rows * torch.logspace(*magnitudes, NUM_ROWS)[:, None]).to(like.device, like.dtype)


def alike(ours: Tensor, theirs: Tensor) -> bool:
    """Whether all rows are the same within the tolerance of their dtype."""
    distance = (ours.float() - theirs.float()).norm(dim=-1)
    return bool((distance <= TOLERANCE[ours.dtype] * theirs.float().norm(dim=-1)).all())
