"""What an engine does per second when it has enough to do."""

from wingbeat.cluster.routing import TokenRate

WINDOW_S = 60.0


class EngineSpeed:
    """Tokens per second, those of prompts and those that are written, while half of the slots or more have work.

    With less to do an engine is slower than it could be, which says nothing about how many engines are needed.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._rate = TokenRate(WINDOW_S)
        self._num_passed = 0
        self._busy = False

    def look(self, num_passed: int, num_requests: int, now: float) -> None:
        """Measure from the last look to now.

        Args:
            num_passed: tokens so far.
            num_requests: that the engine has now.
        """
        was_busy, self._busy = self._busy, 2 * num_requests >= self._num_slots
        if was_busy:
            self._rate.add(num_passed - self._num_passed, now)
        elif self._busy:
            self._rate.resume(now)
        self._num_passed = num_passed

    @property
    def tokens_per_s(self) -> float:
        """The rate; 0 before any was measured."""
        return self._rate.latest_per_s() or 0.0
