"""Pauses between repeated attempts to run a process that fails: the first retry is immediate; from the third retry on,
each pause is twice the previous pause.
"""

FIRST_S = 1.0
LAST_S = 30.0
STABLE_S = 60.0
"""Seconds after which an attempt counts as stable. The failure of a stable attempt begins a new series of failures."""


class BackOff:
    """Computes the pauses before attempts, for successive series of failures.

    Args:
        first_s: pause before the second retry, in seconds; each later pause is twice the previous pause, at most
            `LAST_S`.
    """

    def __init__(self, first_s: float) -> None:
        self.pause_s = 0.0
        """Seconds to wait before the next attempt."""
        self._first_s = first_s

    def lasted(self, seconds: float) -> None:
        """Record that the last attempt ran for `seconds`; if that is more than `STABLE_S`, the next pause is 0
        again.
        """
        if seconds > STABLE_S:
            self.pause_s = 0.0

    def next_pause(self) -> float:
        """Return the seconds to wait before the next attempt, and double the pause for the attempt after that."""
        pause_s = self.pause_s
        self.pause_s = min(max(2 * pause_s, self._first_s), LAST_S)
        return pause_s
