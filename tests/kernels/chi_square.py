"""The chi-square statistic and its limit."""

import torch

# Chi-square limits at p = 1e-6: a right sampler fails one run in a million, and seeds are fixed, so never twice.
CHI2_LIMIT = {9: 44.81, 63: 131.37, 255: 377.07}  # by degrees of freedom


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((observed.double() - expected.double()) ** 2 / expected.double()).sum())
