"""Where the log lines of Wingbeat's own modules go in a process of the application."""

import logging

_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


def show_log() -> None:
    """Write lines from INFO up to stderr, which Ray gathers: without a handler, Python shows warnings alone.

    Leaves a logger alone that has a handler already.
    """
    logger = logging.getLogger("wingbeat")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
