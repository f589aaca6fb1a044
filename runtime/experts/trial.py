"""Rows and tolerances with which parts of a mixture are compared with transformers' modules at load."""

import torch
from torch import Tensor

_NUM_ROWS = 7
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest distance of a row from the original row, relative to the original row's norm, by dtype."""


def drawn_rows(size: int, like: Tensor) -> Tensor:
    """Returns random rows [few, size] of increasing magnitude; large ones reach the limits of gates."""
    rows = torch.randn(_NUM_ROWS, size, generator=torch.Generator().manual_seed(0))
    return (rows * torch.logspace(-2, 1, _NUM_ROWS)[:, None]).to(like.device, like.dtype)


def alike(ours: Tensor, theirs: Tensor) -> bool:
    """Whether rows are the same within the tolerance of their dtype."""
    distance = (ours.float() - theirs.float()).norm(dim=-1)
    return bool((distance <= _TOLERANCE[ours.dtype] * theirs.float().norm(dim=-1)).all())
