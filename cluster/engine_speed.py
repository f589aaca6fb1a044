"""Measures an engine's throughput while enough of its slots have work."""

from wingbeat.cluster.routing import TokenRate

WINDOW_S = 60.0


class EngineSpeed:
    """Throughput in tokens per second, of prompts and outputs, while at least half of the slots have work.

    An engine with less work writes fewer tokens than it could, so the number of engines needed cannot be computed from
    such an engine's rate.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._rate = TokenRate(WINDOW_S)
        self._num_passed = 0
        self._busy = False

    def look(self, num_passed: int, num_requests: int, now: float) -> None:
        """Add the tokens and the time since the last call to the measurement.

        Args:
            num_passed: tokens that the engine has computed so far; a smaller number than in the last call means that
                the engine was replaced.
            num_requests: number of requests that the engine has now.
        """
        was_busy, self._busy = self._busy, 2 * num_requests >= self._num_slots
        if was_busy and num_passed >= self._num_passed:
            self._rate.add(num_passed - self._num_passed, now)
        elif self._busy:
            self._rate.resume(now)
        self._num_passed = num_passed

    @property
    def tokens_per_s(self) -> float:
        """The measured rate; 0 before any measurement."""
        return self._rate.latest_per_s() or 0.0
