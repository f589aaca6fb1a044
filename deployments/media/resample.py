"""Samples at one rate from those at another: each is a sum of its neighbours, weighted by a windowed sinc."""

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_ZEROS = 16
"""Of the sinc on either side."""
_BETA = 9.0
"""Of the Kaiser window: what folds back lies 90 dB below."""
_ROWS = 2**14
"""Samples that are made at once."""


def resample(samples: np.ndarray, source: int, target: int) -> np.ndarray:
    """float32 [n] at `source` per second -> float32 [ceil(n * target / source)] at `target`.

    Sample k is at source position k * source / target = i + f. Its weight of source sample i + j is
    c * sinc(c * (j - f)) times the window, with c = min(1, target / source).
    """
    if source == target:
        return samples
    common = math.gcd(source, target)
    up, down = target // common, source // common
    cutoff = min(1.0, up / down)
    half = math.ceil(_ZEROS / cutoff)
    made = np.empty(-(-len(samples) * up // down), np.float32)
    # Neighbours of source position i begin at i of the padded samples.
    neighbours = sliding_window_view(np.pad(samples, (half - 1, half + down)), 2 * half)
    for phase in range(min(up, len(made))):
        first, rest = divmod(phase * down, up)
        weights = _weights(rest / up, half, cutoff)
        out = made[phase::up]
        rows = neighbours[first::down][: len(out)]
        for begin in range(0, len(out), _ROWS):
            out[begin : begin + _ROWS] = rows[begin : begin + _ROWS] @ weights
    return made


def _weights(fraction: float, half: int, cutoff: float) -> np.ndarray:
    """Of the samples from `half - 1` before a position to `half` behind it, whose sum is 1."""
    apart = np.arange(1 - half, half + 1) - fraction
    window = np.i0(_BETA * np.sqrt(np.maximum(0.0, 1 - (apart / half) ** 2)))
    weights = np.sinc(cutoff * apart) * window
    return (weights / weights.sum()).astype(np.float32)
