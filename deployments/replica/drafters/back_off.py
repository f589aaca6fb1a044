"""Pauses between attempts in a series of failures: the first retry is immediate, later pauses double."""

FIRST_S = 1.0
LAST_S = 30.0
STABLE_S = 60.0
"""An attempt that ran for longer than this ends the series of failures."""


class BackOff:
    """Computes the pauses of one series of failures after another.

    Args:
        first_s: the first pause above 0, which doubles up to `LAST_S`.
    """

    def __init__(self, first_s: float) -> None:
        self.pause_s = 0.0
        """Seconds to wait before the next attempt."""
        self._first_s = first_s

    def lasted(self, seconds: float) -> None:
        """Report that the last attempt ran for `seconds`; above `STABLE_S` the pauses start again at 0."""
        if seconds > STABLE_S:
            self.pause_s = 0.0

    def take(self) -> float:
        """Seconds to wait before this attempt; the pause of the next attempt doubles."""
        pause_s = self.pause_s
        self.pause_s = min(max(2 * pause_s, self._first_s), LAST_S)
        return pause_s
