"""Messages between router, replica and engine.

A request is sent only once, so it is simply pickled. Outputs are sent in every round, so they are msgspec structs,
which are cheaper to encode.
"""

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
    """Reason why an engine does not finish a request."""

    REFUSED = "refused"
    """The request can never run."""
    FAILED = "failed"
    """Processing the request raised an exception, or the request has broken the engine."""
    SUSPECTED = "suspected"
    """This request or another request has broken the engine; this request must run alone in the next engine."""
    RETURNED = "returned"
    """The engine shuts down and has not begun the request; another engine can run the request, which is not suspected
    of a failure.
    """
    WITHDRAWN = "withdrawn"
    """The request had not begun to run, and its router has withdrawn it."""


class GivenUp(NamedTuple):
    """An engine's final message about a request that it does not finish."""

    verdict: Verdict
    reason: str


class WireRequest(NamedTuple):
    """A request sent to an engine."""

    number: int
    """Number of the request within the connection."""
    request: Request
    shared: Any = None
    """Reference to the prompt's spans in shared memory, if they are not in `request`; see hook `share_spans`."""


def received(request: Request, request_id: str) -> Request:
    """Returns the request with the engine's id for it, and validates the parameters, because unpickling does not.

    Raises:
        ValueError: a sampling field is out of range.
    """
    request.params.check()
    return replace(request, request_id=request_id)


class WireOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """New tokens of a request, or the engine's message that it gives up the request."""

    number: int
    """Number of the request within the connection."""
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    metrics: SpeculationMetrics | None = None
    num_cached_tokens: int = 0
    given_up: GivenUp | None = None
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: tuple[int, bytes] | None = None
    """Result of `PackedLogprobs.as_bytes`."""
    rounds: list[VerifiedRound] = []
    queue_s: float = 0.0
    report: bytes = b""

    @classmethod
    def of(cls, number: int, output: RequestOutput) -> "WireOutput":
        """Converts an output of a round to a `WireOutput`; the request's id is replaced by `number`."""
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
        """Whether this is the request's last output."""
        return self.finish_reason is not None or self.given_up is not None

    def add(self, later: "WireOutput") -> None:
        """Appends a later output of the same request."""
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
        """Converts to a `RequestOutput` with an empty request id; the inverse of `of`."""
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


class PendingOutputs:
    """Outputs that wait to be sent. They are merged into one output per request, so their number is at most the number
    of requests.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, WireOutput] = {}
        self._last_words: dict[int, WireOutput] = {}
        """Final messages about requests that were given up, sent after the outputs; later output of these requests is
        dropped.
        """

    def __bool__(self) -> bool:
        return bool(self._outputs or self._last_words)

    def put(self, output: WireOutput) -> None:
        """Adds an output, which the caller must not use any more."""
        if output.number in self._last_words:
            return
        if output.given_up is not None:
            self._last_words[output.number] = output
        elif (earlier := self._outputs.get(output.number)) is None:
            self._outputs[output.number] = output
        else:
            earlier.add(output)

    def give_up(self, number: int, verdict: Verdict, reason: str) -> None:
        """Adds the message that a request will not be finished."""
        self.put(WireOutput(number, given_up=GivenUp(verdict, reason)))

    def drain(self) -> list[WireOutput]:
        """Removes and returns all waiting outputs."""
        outputs = [*self._outputs.values(), *self._last_words.values()]
        self._outputs, self._last_words = {}, {}
        return outputs


class EngineReport(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """State of an engine, sent to a router together with outputs. A field that is None has not changed."""

    changes: CacheChanges | None = None
    """Changes of the engine's prefix cache."""
    others: tuple[int, int] | None = None
    """Number of other routers' requests at the engine, and their outstanding tokens."""
    names: bytes | None = None
    """Changed names known to the replica, as pickled `NameChanges`."""
    stalled: bool | None = None
    """Whether the engine has made no progress for long."""
    takes: bool | None = None
    """Whether the engine accepts new requests."""
    weights: str | None = None
    """Digest of the pushed weights that are served; empty if the weights that the settings name are served."""


class Message(NamedTuple):
    """A message from a replica to a router, or from an engine to its replica."""

    outputs: list[WireOutput]
    report: EngineReport | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)
_RAWS = msgspec.msgpack.Decoder(tuple[list[msgspec.Raw], EngineReport | None])


def encode(outputs: list[WireOutput], report: EngineReport | None = None) -> bytes:
    """Encodes a message; if an output cannot be encoded, its request is given up, and the other outputs are sent."""
    try:
        return _ENCODER.encode((outputs, report))
    except Exception:  # a user's own engine may put any value into an output
        return _ENCODER.encode((list(map(_sendable, outputs)), report))


def decode(message: bytes) -> Message:
    """Decodes a message; if an output cannot be decoded, its request is given up, and the other outputs are kept."""
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
