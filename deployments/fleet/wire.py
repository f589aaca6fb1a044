"""What crosses between router, replica and engine: requests, which are pickled once each, and outputs, which come with
every round and so are structs that msgspec turns into bytes and back."""

import logging
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec.msgpack

from wingbeat.runtime.kv.block_hashes import CacheChanges
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.packed_logprobs import PackedLogprobs
from wingbeat.runtime.scheduling.request import (
    FinishReason,
    Request,
    RequestOutput,
    TokenLogprob,
    VerifiedRound,
)

logger = logging.getLogger(__name__)


class Verdict(StrEnum):
    """What became of a request that its engine does not finish."""

    REFUSED = "refused"
    """It can never run."""
    FAILED = "failed"
    """Processing it raised, or it has broken the engine."""
    SUSPECTED = "suspected"
    """It or another one has broken the engine: it is to run alone at the next one."""
    RETURNED = "returned"
    """The engine goes down without having taken it up: another one can run it as if it had never been here."""
    WITHDRAWN = "withdrawn"
    """It had not begun to run, and its router has asked for it back."""


class GivenUp(NamedTuple):
    """An engine's last word on a request."""

    verdict: Verdict
    reason: str


class WireRequest(NamedTuple):
    """A request on its way to an engine."""

    number: int
    """Within the connection."""
    request: Request
    shared: Any = None
    """Its prompt's spans where they are not in it, because both processes map their memory (`share_spans` of parts)."""


def received(request: Request, request_id: str) -> Request:
    """A request under the id that the engine knows it by, with its fields checked again: pickle does not.

    Raises:
        ValueError: a sampling field is out of range.
    """
    request.params.check()
    return replace(request, request_id=request_id)


class WireOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """New tokens of a request, or an engine's last word on it."""

    number: int
    """Within the connection."""
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    metrics: SpeculationMetrics | None = None
    num_cached_tokens: int = 0
    given_up: GivenUp | None = None
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: tuple[int, bytes] | None = None
    """`PackedLogprobs.as_bytes`"""
    rounds: list[VerifiedRound] = []
    queue_s: float = 0.0
    report: bytes = b""

    @classmethod
    def of(cls, number: int, output: RequestOutput) -> "WireOutput":
        """A round's output as it travels; its request's id stays behind."""
        given_up = None
        if output.failure is not None:
            given_up = GivenUp(Verdict.REFUSED if output.is_refusal else Verdict.FAILED, output.failure)
        return cls(
            number,
            list(output.token_ids),
            output.finish_reason,
            output.metrics,
            output.num_cached_tokens,
            given_up,
            list(output.logprobs),
            output.prompt_logprobs.as_bytes() if output.prompt_logprobs else None,
            list(output.rounds),
            output.queue_s,
            output.report,
        )

    @property
    def is_last(self) -> bool:
        """Whether nothing more comes of its request."""
        return self.finish_reason is not None or self.given_up is not None

    def add(self, later: "WireOutput") -> None:
        """Take over what came after it of the same request."""
        self.token_ids += later.token_ids
        self.finish_reason = later.finish_reason
        self.metrics = later.metrics or self.metrics
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)
        self.logprobs += later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.rounds += later.rounds
        self.queue_s = max(self.queue_s, later.queue_s)
        self.report = self.report or later.report

    def opened(self) -> RequestOutput:
        """The inverse of `of`, without a request's id."""
        return RequestOutput(
            "",
            tuple(self.token_ids),
            self.finish_reason,
            self.metrics,
            self.num_cached_tokens,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=PackedLogprobs.of_bytes(*self.prompt_logprobs) if self.prompt_logprobs else (),
            rounds=tuple(self.rounds),
            queue_s=self.queue_s,
            report=self.report,
        )


class Conflated:
    """Outputs that wait to be sent, one per request however many rounds it had: so many are the requests at most."""

    def __init__(self) -> None:
        self._outputs: dict[int, WireOutput] = {}
        self._last_words: dict[int, WireOutput] = {}
        """Of requests that are given up; they go behind the outputs, and nothing more of these requests does."""

    def __bool__(self) -> bool:
        return bool(self._outputs or self._last_words)

    def put(self, output: WireOutput) -> None:
        """Add an output, which is not the caller's any more."""
        if output.number in self._last_words:
            return
        if output.given_up is not None:
            self._last_words[output.number] = output
        elif (earlier := self._outputs.get(output.number)) is None:
            self._outputs[output.number] = output
        else:
            earlier.add(output)

    def give_up(self, number: int, verdict: Verdict, reason: str) -> None:
        """Say that a request will not be finished."""
        self.put(WireOutput(number, given_up=GivenUp(verdict, reason)))

    def take(self) -> list[WireOutput]:
        """All of it."""
        outputs = [*self._outputs.values(), *self._last_words.values()]
        self._outputs, self._last_words = {}, {}
        return outputs


class EngineReport(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """What an engine tells a router beside the router's own outputs."""

    changes: CacheChanges | None = None
    """Of its prefix cache."""
    others: tuple[int, int] | None = None
    """Requests of other routers there, and their tokens outstanding; None where that is as it was."""
    names: bytes | None = None
    """Changes of names that its replica knows of, as pickled `NameChanges`; None where there are none."""
    stalled: bool | None = None
    """Whether it makes no progress; None where that is as it was."""
    takes: bool | None = None
    """Whether it takes requests that have not begun; None where that is as it was."""
    weights: str | None = None
    """Digest of what was pushed and is served, empty for what the settings name; None where that is as it was."""


class Message(NamedTuple):
    """What a replica has for a router, or an engine for a router's requests."""

    outputs: list[WireOutput]
    report: EngineReport | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)
_RAWS = msgspec.msgpack.Decoder(tuple[list[msgspec.Raw], EngineReport | None])


def encode(outputs: list[WireOutput], report: EngineReport | None = None) -> bytes:
    """A message as bytes; an output that cannot be sent gives up its request and no other."""
    try:
        return _ENCODER.encode((outputs, report))
    except Exception:  # whatever an engine of somebody else's has put into one of them
        return _ENCODER.encode((list(map(_sendable, outputs)), report))


def decode(message: bytes) -> Message:
    """The inverse; an output that cannot be read gives up its request and no other."""
    try:
        return _DECODER.decode(message)
    except msgspec.ValidationError:
        outputs, report = _RAWS.decode(message)
        return Message(list(map(_readable, outputs)), report)


def _sendable(output: WireOutput) -> WireOutput:
    try:
        _ENCODER.encode(output)
    except Exception as error:
        logger.exception("An output of request %d cannot be sent", output.number)
        return _unfit(output.number, f"its output cannot be sent: {type(error).__name__}")
    return output


def _readable(raw: msgspec.Raw) -> WireOutput:
    try:
        return msgspec.msgpack.decode(raw, type=WireOutput)
    except msgspec.ValidationError as error:
        logger.exception("An output cannot be read")
        return _unfit(msgspec.msgpack.decode(raw)[0], f"its output cannot be read: {error}")


def _unfit(number: int, reason: str) -> WireOutput:
    return WireOutput(number, given_up=GivenUp(Verdict.FAILED, reason))
