"""Where the blocks begin that a head which drafts in one pass is trained on."""

import numpy as np
import torch
from torch import Tensor


def draw_anchors(seed: int, step: int, rows: range, learnt: Tensor, num_drafted: int, num_anchors: int) -> Tensor:
    """Positions at which blocks begin, ascending -> int64 [len(rows), num_anchors or as many as there are].

    Each row of a batch has a random stream of its own, so that parts of a batch make up the batch. Positions before
    tokens that are not to be learnt are drawn where there are no others.

    Args:
        rows: numbers of the sequences in the step's batch.
        learnt: bool [len(rows), length]: whether predicting a token is to be learnt.
        num_drafted: tokens behind each that must be there.
    """
    drawn = []
    count = learnt.shape[1] - 1 - num_drafted
    for row, wanted in zip(rows, learnt[:, 2 : 2 + count].numpy(), strict=True):
        order = np.random.default_rng((seed, step, row)).permutation(count)
        chosen = order[np.argsort(~wanted[order], kind="stable")][:num_anchors]
        drawn.append(1 + np.sort(chosen))
    return torch.from_numpy(np.stack(drawn))
