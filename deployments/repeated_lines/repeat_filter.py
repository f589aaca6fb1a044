"""Filter of log lines that shows a repeated line once."""

import logging
import threading
import time
from collections.abc import Callable

from wingbeat.deployments.request_context import ACCESS

REPEAT_QUIET_S, MOST_LINES = 60.0, 1024
"""REPEAT_QUIET_S: seconds within which an equal line counts as a repetition. MOST_LINES: number of remembered lines
above which old lines are forgotten.
"""


class RepeatFilter(logging.Filter):
    """Passes a repeated line once; when the repetition has ended, writes how often the line was repeated.

    Args:
        write: function that writes the line with the number of repetitions.
        quiet_s: seconds within which an equal line counts as a repetition.
        clock: returns seconds.
    """

    def __init__(
        self,
        write: Callable[[logging.LogRecord], object],
        quiet_s: float = REPEAT_QUIET_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._write, self._quiet_s, self._clock = write, quiet_s, clock
        self._seen: dict[tuple[str, int, str], tuple[float, float, int]] = {}
        """For each line: the times of its first and last occurrence, in seconds of `clock`, and the number of
        repetitions that were not written.
        """
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns False for a repeated line, which is then not written; lines of the access log never count as
        repeated.
        """
        if record.name == ACCESS or getattr(record, "ends_repeats", False):
            return True
        key, now = (record.name, record.levelno, record.getMessage()), self._clock()
        with self._lock:
            first, last, held = self._seen.get(key, (now, now, -1))
            is_new = held < 0 or (held == 0 and now - last > self._quiet_s)
            self._seen[key] = (now, now, 0) if is_new else (first, now, held + 1)
            if not is_new and held == 0:
                self._watch(key, self._quiet_s)
            if is_new and len(self._seen) > MOST_LINES:
                self._forget(now)
        return is_new

    def end(self, key: tuple[str, int, str]) -> None:
        """If the line is no longer repeated, writes the number of its repetitions; otherwise sets the timer again."""
        with self._lock:
            first, last, held = self._seen[key]
            remaining = last + self._quiet_s - self._clock()
            if remaining > 0:
                self._watch(key, remaining)
                return
            del self._seen[key]
        text = f"{key[2]} ({held} more times in {last - first:.0f} s, and not since)"
        record = logging.LogRecord(key[0], key[1], "", 0, text, None, None)
        record.ends_repeats = True
        self._write(record)

    def _watch(self, key: tuple[str, int, str], seconds: float) -> None:
        timer = threading.Timer(seconds, self.end, (key,))
        timer.daemon = True
        timer.start()

    def _forget(self, now: float) -> None:
        """Forgets lines that were not repeated and are older than `quiet_s`."""
        self._seen = {key: seen for key, seen in self._seen.items() if seen[2] > 0 or now - seen[1] <= self._quiet_s}
