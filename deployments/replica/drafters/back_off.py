"""Pauses between attempts in a series of failures: the first retry is immediate, and each later pause doubles."""

FIRST_S = 1.0
LAST_S = 30.0
STABLE_S = 60.0
"""Seconds. If an attempt ran for longer before it failed, its failure begins a new series."""


class BackOff:
    """Computes the pauses before attempts, for successive series of failures.

    Args:
        first_s: pause before the second retry, in seconds; later pauses double up to `LAST_S`.
    """

    def __init__(self, first_s: float) -> None:
        self.pause_s = 0.0
        """Seconds to wait before the next attempt."""
        self._first_s = first_s

    def lasted(self, seconds: float) -> None:
        """Report that the last attempt ran for `seconds`; after more than `STABLE_S` the pauses start again at 0."""
        if seconds > STABLE_S:
            self.pause_s = 0.0

    def next_pause(self) -> float:
        """Return the seconds to wait before the next attempt, and doubles the pause for the attempt after that."""
        pause_s = self.pause_s
        self.pause_s = min(max(2 * pause_s, self._first_s), LAST_S)
        return pause_s
