"""What travels between a replica and its engine's process: tuples whose first element is one of these kinds."""

import pickle
from enum import StrEnum
from typing import Any, NamedTuple

from wingbeat.cluster.channels.header import ChannelName
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.interface import ModelInfo

NEEDS_ATTEMPTS = 2
"""Drafters that are asked what they need, one after the other, until an engine cannot start for want of an answer."""


class ToEngine(StrEnum):
    """From the replica, with what follows the kind."""

    START = "start"
    """`EngineStart`"""
    NEEDS = "needs"
    """What the drafter needs, pickled, or None; the error that kept it from starting, or None."""
    SUBMIT = "submit"
    """client, list of WireRequest"""
    ABORT = "abort"
    """client, numbers of its requests"""
    WITHDRAW = "withdraw"
    """client, numbers of its requests: those that have not begun to run are given back"""
    DISCONNECT = "disconnect"
    """client"""
    CALL = "call"
    """number of the call, name of a method of `EngineCalls`, its arguments"""
    STOP = "stop"


class ToReplica(StrEnum):
    """From the engine's process."""

    ASK_NEEDS = "ask needs"
    """Pickled `DrafterTerms`"""
    STARTED = "started"
    """`EngineStarted`"""
    FAILED = "failed"
    """The exception that kept it from starting"""
    OUTPUTS = "outputs"
    """a message of WireOutputs by client, as `encode` makes them"""
    CACHED = "cached"
    """`CacheChanges` of its prefix cache"""
    RESULT = "result"
    """number of the call, its result, its exception or None"""
    ENDED = "ended"
    """Why it runs no more rounds"""


class EngineStart(NamedTuple):
    """What an engine's process is to run."""

    config: AppConfig
    engine_id: str
    core: int | None
    """The core its thread is kept on; None leaves it free."""
    gpus: tuple[int | str, ...] = ()
    """That Ray assigned to the replica."""
    address: str | None = None
    """Of this node, where the drafter comes over the network; None where it shares this node's memory."""
    spread: Any = None
    """See `PairSettings`: what the processes that a verifier is spread over find each other by."""
    log_level: str = "info"
    weights: str = ""
    """Digest that the weights must have, where they were pushed."""


class EngineStarted(NamedTuple):
    """An engine that is ready for its drafter, or for requests where it has none."""

    info: ModelInfo
    channel_name: ChannelName | None
    """Where its drafter is to attach; None where it takes none."""
    checks_drafter: bool
    """Whether the first drafter that is attached is to be tried."""
    channel_problem: str | None = None
    """Why GPU memory does not carry rounds, where that is known before a drafter attaches."""


def name_of(client_id: str, number: int) -> str:
    """Unique in the engine: two routers, or two connections of one router, count independently."""
    return f"{client_id}:{number}"


def owner(name: str) -> tuple[str, int]:
    """The inverse; of an engine's own requests too, which are nobody's."""
    client_id, _, number = name.rpartition(":")
    return client_id, int(number) if number.isdecimal() else -1


def portable(error: BaseException) -> Exception:
    """The error itself, or where that cannot travel, one of the same words."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class makes of that
        return RuntimeError(f"{type(error).__name__}: {error}")
