"""Pauses in a series of failures: the first is answered at once, each further one after twice the pause."""

FIRST_S = 1.0
LAST_S = 30.0
STABLE_S = 60.0
"""What lasted this long is not part of a series of failures."""


class BackOff:
    """One series after the other.

    Args:
        first_s: the first pause that is one, which doubles up to `LAST_S`.
    """

    def __init__(self, first_s: float) -> None:
        self.pause_s = 0.0
        """Before the next attempt."""
        self._first_s = first_s

    def lasted(self, seconds: float) -> None:
        """What was started last was there for so long."""
        if seconds > STABLE_S:
            self.pause_s = 0.0

    def take(self) -> float:
        """The pause before this attempt; that before the next one is longer."""
        pause_s = self.pause_s
        self.pause_s = min(max(2 * pause_s, self._first_s), LAST_S)
        return pause_s
