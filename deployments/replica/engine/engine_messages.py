"""Messages between a replica and its engine's process: tuples whose first element is a kind defined here."""

import pickle
from enum import StrEnum
from typing import Any, NamedTuple

from wingbeat.cluster.channels.header import ChannelName
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.interface import ModelInfo

NEEDS_ATTEMPTS = 2
"""Number of drafters that are asked in turn for their needs before the engine's start fails."""


class ToEngine(StrEnum):
    """Kinds of messages from the replica; the strings below list the elements that follow the kind."""

    START = "start"
    """`EngineStart`"""
    NEEDS = "needs"
    """Pickled `DrafterNeeds` or None; the error that prevented the drafter's start, or None."""
    SUBMIT = "submit"
    """client, list of WireRequest"""
    ABORT = "abort"
    """client, numbers of its requests"""
    WITHDRAW = "withdraw"
    """client, numbers of its requests; requests that have not begun to run are given back"""
    DISCONNECT = "disconnect"
    """client"""
    CALL = "call"
    """number of the call, name of a method of `EngineCalls`, its arguments"""
    STOP = "stop"


class ToReplica(StrEnum):
    """Kinds of messages from the engine's process; the strings below list the elements that follow the kind."""

    ASK_NEEDS = "ask needs"
    """Pickled `DrafterTerms`"""
    STARTED = "started"
    """`EngineStarted`"""
    FAILED = "failed"
    """The exception that prevented the start"""
    OUTPUTS = "outputs"
    """encoded WireOutputs by client, as `encode` returns them"""
    CACHED = "cached"
    """`CacheChanges` of its prefix cache"""
    RESULT = "result"
    """number of the call, its result, its exception or None"""
    ENDED = "ended"
    """Reason for which the engine runs no more rounds"""


class EngineStart(NamedTuple):
    """Parameters of an engine's process."""

    config: AppConfig
    engine_id: str
    core: int | None
    """CPU core that the engine's thread is pinned to; None does not pin it."""
    gpus: tuple[int | str, ...] = ()
    """Ids of the GPUs that Ray assigned to the replica."""
    address: str | None = None
    """Address of this node, if the drafter connects over the network; None if it shares this node's memory."""
    spread: Any = None
    """See `PairSettings`: rendezvous of the processes that a verifier is spread over."""
    log_level: str = "info"
    weights: str = ""
    """Digest that pushed weights must have; empty if none were pushed."""


class EngineStarted(NamedTuple):
    """Reply of an engine that is ready for its drafter, or for requests if it has none."""

    info: ModelInfo
    channel_name: ChannelName | None
    """Channel that the drafter is to attach to; None if the engine takes no drafter."""
    checks_drafter: bool
    """Whether the first attached drafter is to pass the self-test."""
    channel_problem: str | None = None
    """Why GPU memory does not carry rounds, if that is known before a drafter attaches."""


def name_of(client_id: str, number: int) -> str:
    """Engine-wide id of a request: routers, and connections of one router, number their requests independently."""
    return f"{client_id}:{number}"


def owner(name: str) -> tuple[str, int]:
    """Client and number of an engine-wide id, inverse of `name_of`; the number is -1 for an engine's own requests."""
    client_id, _, number = name.rpartition(":")
    return client_id, int(number) if number.isdecimal() else -1


def portable(error: BaseException) -> Exception:
    """The error itself if it can be pickled, else a RuntimeError with the same message."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # exceptions of any class may come from unpickling
        return RuntimeError(f"{type(error).__name__}: {error}")
