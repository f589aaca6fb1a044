"""Where the host's time goes in a round."""

import time
from dataclasses import dataclass


@dataclass
class PhaseTimes:
    """Host seconds spent in each phase of the rounds so far; on an accelerator, mostly spent on enqueueing."""

    num_rounds: int = 0
    schedule_s: float = 0.0
    draft_wait_s: float = 0.0
    verify_s: float = 0.0
    """The verifier's forward passes."""
    accept_s: float = 0.0
    """Flattening the batch, choosing tokens, walking trees, compacting KV."""
    publish_s: float = 0.0
    wait_s: float = 0.0
    """For the accepted tokens: what the device still has to do when the host has nothing left to do."""
    update_s: float = 0.0


class Stopwatch:
    """Adds the time since its last lap to a phase."""

    def __init__(self, phases: PhaseTimes) -> None:
        self._phases = phases
        self._started = self._last = time.perf_counter()

    @property
    def total_s(self) -> float:
        """Of all laps."""
        return self._last - self._started

    def lap(self, phase: str, **within: float) -> float:
        """End a phase and return its seconds.

        Args:
            within: seconds of it that belong to other phases.
        """
        now = time.perf_counter()
        spent, self._last = now - self._last, now
        for name, seconds in (within | {phase: spent - sum(within.values())}).items():
            setattr(self._phases, name, getattr(self._phases, name) + seconds)
        return spent
