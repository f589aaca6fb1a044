"""Counts of values by size, as Prometheus keeps them: plain data that can be summed and sent."""

from bisect import bisect_left
from dataclasses import dataclass, field

REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
"""vLLM's bounds of what a request or one of its phases takes, in seconds; so are the following."""
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
ROUND_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 and so on up to `limit`: bounds of numbers of tokens."""
    powers = (10**exponent for exponent in range(len(str(limit))))
    return tuple(bound for power in powers for bound in (power, 2 * power, 5 * power) if bound <= limit)


@dataclass
class Histogram:
    """How many values were at most each bound and above the one before."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    """One more than there are bounds: the last one is of values above all of them."""
    total: float = 0.0
    """Sum of the values."""

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
