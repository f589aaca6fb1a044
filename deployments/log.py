"""Logging of Wingbeat's modules in each process of the application."""

import logging
import os
import sys
from enum import StrEnum

from wingbeat.deployments.parts import hooks
from wingbeat.deployments.request_context import ACCESS, current

LEVEL_VARIABLE = "WINGBEAT_LOG_LEVEL"
"""Environment variable with the log level that a process starts with."""
_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s%(request)s"


class LogLevel(StrEnum):
    """Level of a log: lines of lower levels are not written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def level_at_start() -> LogLevel:
    """Returns the level in the environment variable `LEVEL_VARIABLE`; level info if the variable is absent or
    invalid.
    """
    level = os.environ.get(LEVEL_VARIABLE, "")
    return LogLevel(level) if level in {*LogLevel} else LogLevel.INFO


def level_environment() -> dict[str, str]:
    """Returns the environment variables that pass this process's level to other processes; empty if no level is set."""
    return {LEVEL_VARIABLE: level_at_start().value} if LEVEL_VARIABLE in os.environ else {}


class RequestIdFilter(logging.Filter):
    """Adds to each line the `X-Request-Id` of the request that the line belongs to, if there is one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Sets `record.request`; passes every line."""
        context = current()
        request_id = "" if context is None or record.name == ACCESS else context.request_id
        record.request = f" [request {request_id}]" if request_id else ""
        return True


def show_log() -> None:
    """Makes the logger write lines of `level_at_start` and higher levels to stderr, which Ray collects.

    Without a handler, Python would write only warnings and errors. A logger that already has a handler is left
    unchanged.
    """
    logger = logging.getLogger("wingbeat")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    for new_filter in hooks("log_filter"):
        handler.addFilter(new_filter(handler.handle))
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    set_log_level(level_at_start())


def set_log_level(level: str) -> None:
    """Sets the lowest level that is written; `level` is the name of a level of `logging`, in lower or upper case."""
    logging.getLogger("wingbeat").setLevel(level.upper())


def show_lines(name: str) -> None:
    """Makes a logger write its messages of level INFO and higher, without time and level, to the current standard
    error.
    """
    logger = logging.getLogger(name)
    if not any(isinstance(handler, _Messages) for handler in logger.handlers):
        logger.addHandler(_Messages())
        logger.setLevel(logging.INFO)


class _Messages(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr)
