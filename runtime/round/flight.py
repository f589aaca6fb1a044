"""A round between its launch and the moment the host knows what it decided."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from wingbeat.runtime.protocol.messages import AcceptedPaths
from wingbeat.runtime.protocol.transfer import Download
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput


class RoundResult(NamedTuple):
    """What a round decided, on the host."""

    token_ids: list[list[int]]
    """The emitted tokens, by decode."""
    num_valid: list[int]
    """Nodes of the tree that was verified, by decode; 1 is a bare root."""
    chunk_token_ids: list[list[int]]
    """By chunk: the token its last row yields, or nothing."""
    path_nodes: np.ndarray
    """int64 [num_decodes, 1..max_path]: root and accepted nodes, the last one repeated."""
    evidence: np.ndarray | None = None
    """int64 [num_decodes, num_nodes]: see `AcceptedPaths.evidence`."""
    logprobs: np.ndarray | None = None
    """int64 [1..num_decodes, 1..max_path, n]: see `RoundInFlight.asking` and `runtime.round.choice`."""
    chunk_logprobs: np.ndarray | None = None
    """int64 [num_sampling_chunks + num_prompt_tokens, n]."""
    reported: np.ndarray | None = None
    """float64 [num_reported_chunks, n], by chunk with a `report`."""


@dataclass
class RoundTimes:
    """What a round took on the host, as far as it is known: filled in until the round is settled."""

    forward_s: float
    """The verifier's forward pass; on an accelerator, enqueueing it."""
    draft_s: float = 0.0
    """From asking for its trees to having them, as far as nothing else was done meanwhile."""
    publish_s: float = 0.0
    """Telling the drafter, since the round before was settled."""
    host_s: float = 0.0
    """Everything else since then."""


@dataclass
class RoundInFlight:
    """A launched round."""

    plan: SchedulerOutput
    epochs: list[int]
    """By decode, then by chunk: a sequence whose epoch is another one by now has left, and its row is void."""
    decodes: AcceptedPaths
    sampled: Tensor
    """int64 [num_sampling_chunks]: the token that each chunk with `samples` yields."""
    chunk_taps: Tensor | None
    """[num_chunk_tokens, taps_size], chunks back to back."""
    times: RoundTimes
    download: Download
    told: tuple[str, ...] = ()
    """What the download brings, by name."""
    asking: dict[int, int] = field(default_factory=dict)
    """By decode that asks for log-probabilities: their row in the result."""
    num_targets: list[int] = field(default_factory=list)
    """By chunk: prompt tokens whose log-probabilities are in the result."""
    by_text: list[bool] = field(default_factory=list)
    """By decode: whether its tree was made of earlier text."""
    result: RoundResult | None = None
    """What it decided, once the host knows."""
    live: list[bool] = field(default_factory=list)
    """By decode, then by chunk, once it is settled: whether the row's sequence takes what was decided for it."""

    def wait(self) -> RoundResult:
        """The tokens, once the device has decided them: the one wait of a round."""
        if self.result is None:
            self.result = self._result()
        return self.result

    def settle(self) -> RoundResult:
        """The tokens, at the moment when the sequences take them."""
        result, plan = self.wait(), self.plan
        self.live = [epoch == then for epoch, then in zip(epochs_of(plan), self.epochs, strict=True)]
        return result

    def report(self, result: RoundResult) -> None:
        """Hand what is reported to the sequences that asked for it."""
        if result.logprobs is not None:
            for row, index in self.asking.items():
                if self.live[row]:
                    count = len(result.token_ids[row])
                    self.plan.decodes[row].reports.add_tokens(result.logprobs[index][:count])
        if result.chunk_logprobs is not None:
            self._report_chunks(result.chunk_logprobs)
        if result.reported is not None:
            chunks = zip(self.plan.chunks, self.live[len(self.plan.decodes) :], strict=True)
            reported = [(chunk, live) for chunk, live in chunks if chunk.report is not None]
            for (chunk, live), row in zip(reported, result.reported, strict=True):
                if live:
                    chunk.seq.reports.add_row(row)

    def _report_chunks(self, packed: np.ndarray) -> None:
        begin = sum(chunk.samples for chunk in self.plan.chunks)
        sampled = iter(packed[:begin, None])
        for chunk, num_targets, live in zip(
            self.plan.chunks, self.num_targets, self.live[len(self.plan.decodes) :], strict=True
        ):
            end = begin + num_targets
            own = next(sampled) if chunk.samples else packed[:0]
            if live and chunk.seq.reports is not None:
                chunk.seq.reports.add_tokens(own)
                chunk.seq.reports.add_prompt(packed[begin:end])
            begin = end

    def num_new_tokens(self, row: int) -> int:
        """Tokens a decode emitted, or the least it can have emitted while the host does not know."""
        return 1 if self.result is None else len(self.result.token_ids[row])

    def tokens_by_slot(self) -> dict[int, list[int]]:
        """What the round emitted, once the host knows it."""
        decoded = zip(self.plan.decodes, self.result.token_ids, strict=True)
        sampled = (
            (chunk.seq, ids) for chunk, ids in zip(self.plan.chunks, self.result.chunk_token_ids, strict=True) if ids
        )
        return {seq.slot: token_ids for seq, token_ids in (*decoded, *sampled)}

    def _result(self) -> RoundResult:
        told = dict(zip(self.told, self.download.wait(), strict=True))
        left, counts = iter(told["sampled"].tolist() if "sampled" in told else ()), told["num_tokens"].tolist()
        return RoundResult(
            token_ids=[row[:count] for row, count in zip(told["token_ids"].tolist(), counts, strict=True)],
            num_valid=told["num_valid"].tolist(),
            chunk_token_ids=[[next(left)] if chunk.samples else [] for chunk in self.plan.chunks],
            path_nodes=told["nodes"],
            evidence=told.get("evidence"),
            logprobs=told.get("logprobs"),
            chunk_logprobs=told.get("chunk_logprobs"),
            reported=told["reported"].view(np.float64) if "reported" in told else None,
        )


class RoundObserver:
    """Watches an engine's rounds from its thread: sees each one launched and settled, in the same order."""

    def launched(self, flight: RoundInFlight) -> None:
        """A round was enqueued, and the next one is not."""

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """The oldest launched round is decided, and its sequences have not taken its tokens yet."""

    def abandoned(self) -> None:
        """The rounds launched and not settled never will be: their sequences are computed again."""

    def ended(self, request_id: str) -> None:
        """A request has finished, failed or was aborted."""

    def renewed(self) -> None:
        """The verifier has other weights from the next round on; none is in flight."""


NOTHING_TOLD: Mapping[str, Tensor] = {}


class FirstTokens(NamedTuple):
    """What a round decided for its prompt chunks."""

    sampled: Tensor
    """int64 [num_sampling_chunks]: the token that each chunk with `samples` yields."""
    taps: Tensor | None = None
    """[num_chunk_tokens, taps_size], chunks back to back."""
    logprobs: Tensor | None = None
    """As `RoundResult.chunk_logprobs`."""
    told: Mapping[str, Tensor] = NOTHING_TOLD
    """As `Feature.told`, of all features."""


def epochs_of(plan: SchedulerOutput) -> list[int]:
    """As `RoundInFlight.epochs`, while the sequences are those of the plan."""
    return [seq.epoch for seq in plan.decodes] + [chunk.seq.epoch for chunk in plan.chunks]


def launched_round(
    plan: SchedulerOutput,
    epochs: list[int],
    accepted: AcceptedPaths,
    first: FirstTokens,
    forward_s: float,
    asking: list[int] | None = None,
) -> RoundInFlight:
    """A round whose work is enqueued; its tokens start on their way to the host.

    Args:
        forward_s: host seconds in the forward pass.
        asking: decodes that `accepted.logprobs` has a row of; None where it has all.
    """
    told = accepted.told()
    if accepted.packed is None:
        told |= {"sampled": first.sampled} | ({} if first.logprobs is None else {"chunk_logprobs": first.logprobs})
        told |= first.told
    rows = range(len(plan.decodes)) if asking is None else asking
    return RoundInFlight(
        plan=plan,
        epochs=epochs,
        decodes=accepted,
        sampled=first.sampled,
        chunk_taps=first.taps,
        times=RoundTimes(forward_s),
        download=Download(list(told.values()), accepted.packed, stays=asking is not None),
        told=tuple(told),
        asking={row: index for index, row in enumerate(rows) if plan.decodes[row].reports is not None},
        num_targets=[len(chunk.prompt_targets()) for chunk in plan.chunks],
        by_text=plan.with_texts(),
    )
