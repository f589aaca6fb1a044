"""Where the log lines of Wingbeat's own modules go in a process of the application."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from enum import StrEnum

from wingbeat.deployments.request_context import ACCESS, current

LEVEL_VARIABLE = "WINGBEAT_LOG_LEVEL"
"""Environment variable of every process of an application: the level that it starts with."""
REPEAT_QUIET_S, MOST_LINES = 60.0, 1024
"""A line that comes again within this time is a repetition; lines that are remembered before old ones are dropped."""
_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s%(request)s"


class LogLevel(StrEnum):
    """Least level of the lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def level_at_start() -> LogLevel:
    """The level in the environment; info where the environment has none."""
    level = os.environ.get(LEVEL_VARIABLE, "")
    return LogLevel(level) if level in {*LogLevel} else LogLevel.INFO


def level_environment() -> dict[str, str]:
    """The environment that gives other processes the level of this process's environment."""
    return {LEVEL_VARIABLE: level_at_start().value} if LEVEL_VARIABLE in os.environ else {}


class RequestIdFilter(logging.Filter):
    """Gives a line the `X-Request-Id` of the request that it was written for, where there is one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Every line passes."""
        context = current()
        told = context is not None and context.request_id and record.name != ACCESS
        record.request = f" [request {context.request_id}]" if told else ""
        return True


class RepeatFilter(logging.Filter):
    """Lets a line through once, and when it has not come again for a while, says how often it came.

    Args:
        write: takes the line of the end.
        quiet_s: a line that comes again within this time is a repetition.
        clock: seconds.
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
        """By line: when it came first and last, and how often it was held back."""
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is new; lines of the access log always are."""
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
        """Say that a repeated line has ended, or look again later where it has not."""
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
        """Drop lines that came once and long ago."""
        self._seen = {key: seen for key, seen in self._seen.items() if seen[2] > 0 or now - seen[1] <= self._quiet_s}


def show_log() -> None:
    """Write lines from `level_at_start` up to stderr, which Ray gathers.

    Without a handler, Python shows warnings alone. Leaves a logger alone that has a handler already.
    """
    logger = logging.getLogger("wingbeat")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.addFilter(RepeatFilter(handler.handle))
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    set_log_level(level_at_start())


def set_log_level(level: str) -> None:
    """Write lines from a level of `logging` up, in whatever case its name is."""
    logging.getLogger("wingbeat").setLevel(level.upper())


def show_lines(name: str) -> None:
    """Write the messages of one logger, from INFO up and without more, to the standard error as it is at the time."""
    logger = logging.getLogger(name)
    if not any(isinstance(handler, _Messages) for handler in logger.handlers):
        logger.addHandler(_Messages())
        logger.setLevel(logging.INFO)


class _Messages(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr)
