"""Messages between a replica and its engine's process. A message is a tuple that begins with a kind defined here."""

import pickle
from enum import StrEnum
from typing import Any, NamedTuple

from wingbeat.cluster.channels.header import ChannelName
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.interface import ModelInfo

NEEDS_ATTEMPTS = 2
"""Number of drafters that are started in turn until a drafter returns its `DrafterNeeds`. If no drafter does, the start
of the engine fails.
"""


class ToEngine(StrEnum):
    """Kinds of messages from the replica. The string below each kind lists the elements that follow the kind."""

    START = "start"
    """`EngineStart`"""
    NEEDS = "needs"
    """two elements: pickled `DrafterNeeds` or None; the error that prevented the drafter's start or None"""
    SUBMIT = "submit"
    """client, list of WireRequest"""
    ABORT = "abort"
    """client, numbers of its requests"""
    WITHDRAW = "withdraw"
    """client, numbers of its requests; of these, requests that have not begun to run are given back to the client"""
    DISCONNECT = "disconnect"
    """client"""
    CALL = "call"
    """number of the call, name of a method of `EngineCalls`, its arguments"""
    STOP = "stop"


class ToReplica(StrEnum):
    """Kinds of messages from the engine. The string below each kind lists the elements that follow the kind."""

    ASK_NEEDS = "ask needs"
    """pickled `DrafterTerms`"""
    STARTED = "started"
    """`EngineStarted`"""
    FAILED = "failed"
    """the exception that prevented the engine's start"""
    OUTPUTS = "outputs"
    """dict of client to its outputs, encoded by `encode`"""
    CACHED = "cached"
    """`CacheChanges` of the engine's prefix cache"""
    RESULT = "result"
    """number of the call, its result, its exception or None"""
    ENDED = "ended"
    """reason why the engine runs no more rounds"""


class EngineStart(NamedTuple):
    """Parameters of an engine's process."""

    config: AppConfig
    engine_id: str
    core: int | None
    """CPU core that the engine's thread is pinned to; None does not pin the thread."""
    gpus: tuple[int | str, ...] = ()
    """Ids of the GPUs that Ray has assigned to the replica."""
    address: str | None = None
    """Address of this node if the drafter connects over the network; None if the drafter is on this node."""
    spread: Any = None
    """Rendezvous of the processes that a verifier is spread over; see `PairSettings`."""
    log_level: str = "info"
    weights: str = ""
    """Digest that the pushed weights must have; empty if no weights were pushed."""


class EngineStarted(NamedTuple):
    """Message of an engine that is loaded and ready for its drafter, or for requests if it has no drafter."""

    info: ModelInfo
    channel_name: ChannelName | None
    """Channel that the drafter is to attach to; None if no drafter attaches to the engine."""
    checks_drafter: bool
    """Whether the first attached drafter is to pass the self-test."""
    channel_problem: str | None = None
    """Why a channel in GPU memory does not work; None if no problem is known before a drafter attaches."""


def name_of(client_id: str, number: int) -> str:
    """Return the engine-wide id of a request.

    The client is part of the id, because clients (connections of routers) number their requests independently.
    """
    return f"{client_id}:{number}"


def owner(name: str) -> tuple[str, int]:
    """Return client and number of an engine-wide id; inverse of `name_of`. The number is -1 for an engine's own
    requests.
    """
    client_id, _, number = name.rpartition(":")
    return client_id, int(number) if number.isdecimal() else -1


def portable(error: BaseException) -> Exception:
    """Return the error itself if it can be pickled, else a RuntimeError with the error's message."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # unpickling may raise exceptions of any class
        return RuntimeError(f"{type(error).__name__}: {error}")
