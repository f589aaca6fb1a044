"""Marks errors of a replica's start that would occur again if the start were repeated."""

from collections.abc import Iterator
from contextlib import contextmanager

from wingbeat.cluster.channels.header import ChannelError
from wingbeat.deployments.replica.drafters.supervisor import root_cause
from wingbeat.deployments.replica.engine.engine_setup import DrafterStartError


class RefusedStartError(RuntimeError):
    """The settings or the files are wrong; the message is one line that names what to change."""


_MARK = f"{RefusedStartError.__name__}: "


@contextmanager
def refusals() -> Iterator[None]:
    """Context manager for a replica's start that converts errors about settings and files to RefusedStartError."""
    try:
        yield
    except (ValueError, FileNotFoundError, ChannelError, DrafterStartError) as error:
        raise RefusedStartError(" ".join(str(error).split())) from None


def refusal(message: str | None) -> str | None:
    """Extract the message of a RefusedStartError from `message`, Serve's status message of a deployment. Returns None
    if the status message contains no such error.
    """
    cause = root_cause(message or "")
    return cause.removeprefix(_MARK) if cause.startswith(_MARK) else None
