"""What crosses between router and verifier per message: plain tuples, because pickling named classes costs the engine's
process time that its rounds need."""

from collections.abc import Iterable
from dataclasses import astuple, replace
from enum import StrEnum
from typing import NamedTuple

from wingbeat.runtime.kv.cache_log import CacheChanges
from wingbeat.runtime.lora.resident import AdapterName
from wingbeat.runtime.scheduling.images import ImageInput
from wingbeat.runtime.scheduling.packed_logprobs import PackedLogprobs
from wingbeat.runtime.scheduling.request import (
    FinishReason,
    GrammarSpec,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    VerifiedRound,
)
from wingbeat.runtime.scheduling.speculation_metrics import SpeculationMetrics

WireRequest = tuple[int, tuple[int, ...], tuple, tuple[int, ...], bool, tuple | None, tuple]
"""(number within the connection, prompt token ids, fields of SamplingParams in order, tokens generated already, whether
it is on trial, fields of its AdapterName, fields of ImageInput by image)"""
WireOutput = tuple[
    int, tuple[int, ...], str | None, tuple | None, int, tuple[str, str] | None, tuple, tuple | None, tuple, float
]
"""(number, new token ids, finish reason, fields of SpeculationMetrics, cached tokens, fields of GivenUp, fields of
TokenLogprob by token, `PackedLogprobs.as_bytes` of the prompt, fields of VerifiedRound by round, seconds of waiting)"""

ON_TRIAL, IMAGES = 4, 6
"""Places in a WireRequest."""
FINISH_REASON, GIVEN_UP = 2, 5
"""Places in a WireOutput."""
REPORT = -1
"""In the place of a request's number: the fields of an `EngineReport` follow."""


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


class EngineReport(NamedTuple):
    """What an engine tells a router beside the router's own outputs."""

    changes: CacheChanges | None = None
    """Of its prefix cache."""
    others: tuple[int, int] | None = None
    """Requests of other routers there, and their tokens outstanding; None where that is as it was."""
    adapters: tuple[tuple, ...] | None = None
    """`AdapterCatalog.changes` of its replica; None where they are as they were."""
    prefixes: tuple[tuple, ...] | None = None
    """The same of saved prefixes."""
    stalled: bool | None = None
    """Whether it makes no progress; None where that is as it was."""


def pack_report(report: EngineReport) -> tuple:
    """A report as it travels among the outputs."""
    return REPORT, None if report.changes is None else tuple(report.changes), *report[1:]


def unpack_report(packed: tuple) -> EngineReport:
    """The inverse."""
    _, changes, *others = packed
    return EngineReport(None if changes is None else CacheChanges(*changes), *others)


def pack_request(number: int, request: Request) -> WireRequest:
    """The request as it travels; its id stays with the router."""
    params = request.params
    if params.grammar is not None:
        params = replace(params, grammar=tuple(params.grammar))
    adapter = None if request.adapter is None else tuple(request.adapter)
    images = tuple(map(tuple, request.images))
    rest = (request.output_token_ids, request.on_trial, adapter, images)
    return number, request.prompt_token_ids, astuple(params), *rest


def unpack_request(packed: WireRequest, request_id: str) -> Request:
    """The inverse, under the id the engine knows it by.

    Raises:
        ValueError: a sampling field is out of range.
    """
    _, prompt_token_ids, fields, output_token_ids, on_trial, adapter, images = packed
    params = SamplingParams(*fields)
    if params.grammar is not None:
        kind, text, name = params.grammar
        params = replace(params, grammar=GrammarSpec(kind, text, name))
    adapter = None if adapter is None else AdapterName(*adapter)
    shown = tuple(ImageInput(*image) for image in images)
    tokens = tuple(prompt_token_ids), params, tuple(output_token_ids)
    return Request(request_id, *tokens, bool(on_trial), adapter, shown)


def pack_output(number: int, output: RequestOutput) -> WireOutput:
    """One request's new tokens as they travel."""
    metrics = None if output.metrics is None else _pack_metrics(output.metrics)
    finish = None if output.finish_reason is None else str(output.finish_reason)
    verdict = Verdict.REFUSED if output.is_refusal else Verdict.FAILED
    given_up = None if output.failure is None else (str(verdict), output.failure)
    of_prompt = output.prompt_logprobs.as_bytes() if output.prompt_logprobs else None
    extras = (tuple(map(tuple, output.logprobs)), of_prompt, tuple(map(tuple, output.rounds)), output.queue_s)
    return number, output.token_ids, finish, metrics, output.num_cached_tokens, given_up, *extras


def pack_given_up(number: int, given_up: GivenUp) -> WireOutput:
    """Tells the router that the engine will not finish this request."""
    return number, (), None, None, 0, (str(given_up.verdict), given_up.reason), (), None, (), 0.0


def unpack(packed: WireOutput) -> tuple[int, RequestOutput, GivenUp | None]:
    """The inverse of both: (number, output, where the engine does not finish it); the output bears no request id."""
    number, token_ids, finish, metrics, num_cached_tokens, given_up, logprobs, prompt_logprobs, rounds, queue_s = packed
    output = RequestOutput(
        "",
        tuple(token_ids),
        None if finish is None else FinishReason(finish),
        None if metrics is None else SpeculationMetrics(*metrics[:3], list(metrics[3]), metrics[4]),
        num_cached_tokens,
        logprobs=tuple(TokenLogprob(*entry) for entry in logprobs),
        prompt_logprobs=PackedLogprobs.of_bytes(*prompt_logprobs) if prompt_logprobs else (),
        rounds=tuple(VerifiedRound(*packed_round) for packed_round in rounds),
        queue_s=queue_s,
    )
    return number, output, None if given_up is None else GivenUp(Verdict(given_up[0]), given_up[1])


def merge(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """Several rounds of one request as one output.

    Raises:
        ValueError: there is none.
    """
    merged, *rest = outputs
    for output in rest:
        merged = output._replace(
            token_ids=merged.token_ids + output.token_ids,
            metrics=output.metrics or merged.metrics,
            num_cached_tokens=max(output.num_cached_tokens, merged.num_cached_tokens),
            logprobs=merged.logprobs + output.logprobs,
            prompt_logprobs=merged.prompt_logprobs or output.prompt_logprobs,
            rounds=merged.rounds + output.rounds,
            queue_s=max(output.queue_s, merged.queue_s),
        )
    return merged


def join(first: WireOutput, later: WireOutput) -> WireOutput:
    """Two outputs of one request, as they travel, as one; `merge` is the same of those that are unpacked."""
    number, token_ids, _, metrics, num_cached_tokens, _, logprobs, prompt_logprobs, rounds, queue_s = first
    return (
        number,
        token_ids + later[1],
        later[2],
        later[3] or metrics,
        max(num_cached_tokens, later[4]),
        later[5],
        logprobs + later[6],
        prompt_logprobs or later[7],
        rounds + later[8],
        max(queue_s, later[9]),
    )


def _pack_metrics(metrics: SpeculationMetrics) -> tuple:
    return (
        metrics.num_drafts,
        metrics.num_draft_tokens,
        metrics.num_accepted_tokens,
        tuple(metrics.num_accepted_tokens_per_pos),
        metrics.forced_acceptance,
    )
