"""Draws the positions at which a one-pass head's training blocks start."""

import numpy as np
import torch
from torch import Tensor


def draw_anchors(seed: int, step: int, rows: range, learnt: Tensor, num_drafted: int, num_anchors: int) -> Tensor:
    """Draws start positions of blocks, ascending -> int64 [len(rows), min(num_anchors, number of candidates)].

    Each row of a batch has its own random stream, so that a row gets the same positions whether the batch is split into
    parts or not. A position whose next token is not to be learnt is drawn only if there are too few other positions.

    Args:
        seed, step: select the random streams.
        rows: indices of the sequences in the step's batch.
        learnt: bool [len(rows), length]: whether the prediction of a token is to be learnt.
        num_drafted: number of tokens that must follow a block's start.
        num_anchors: maximum number of positions per row.
    """
    drawn = []
    count = learnt.shape[1] - 1 - num_drafted
    for row, wanted in zip(rows, learnt[:, 2 : 2 + count].numpy(), strict=True):
        order = np.random.default_rng((seed, step, row)).permutation(count)
        chosen = order[np.argsort(~wanted[order], kind="stable")][:num_anchors]
        drawn.append(1 + np.sort(chosen))
    return torch.from_numpy(np.stack(drawn))
