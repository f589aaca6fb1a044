"""Where the log lines of Wingbeat's own modules go in a process of the application."""

import logging
import os
import sys
from enum import StrEnum

from wingbeat.deployments.request_context import ACCESS, current

LEVEL_VARIABLE = "WINGBEAT_LOG_LEVEL"
"""Environment variable of every process of an application: the level that it starts with."""
_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s%(request)s"


class LogLevel(StrEnum):
    """Least level of the lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def level_at_start() -> str:
    """The level in the environment; info where the environment has none."""
    level = os.environ.get(LEVEL_VARIABLE, "")
    return level if level in {*LogLevel} else LogLevel.INFO.value


def level_environment() -> dict[str, str]:
    """The environment that gives other processes the level of this process's environment."""
    return {LEVEL_VARIABLE: level_at_start()} if LEVEL_VARIABLE in os.environ else {}


class RequestIdFilter(logging.Filter):
    """Gives a line the `X-Request-Id` of the request that it was written for, where there is one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Every line passes."""
        context = current()
        told = context is not None and context.request_id and record.name != ACCESS
        record.request = f" [request {context.request_id}]" if told else ""
        return True


def show_log() -> None:
    """Write lines from `level_at_start` up to stderr, which Ray gathers.

    Without a handler, Python shows warnings alone. Leaves a logger alone that has a handler already.
    """
    logger = logging.getLogger("wingbeat")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
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
