"""Rounds in flight: launched rounds whose tokens the host does not have yet, and their results."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from wingbeat.runtime.protocol.messages import AcceptedPaths
from wingbeat.runtime.protocol.transfer import Download
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput


class RoundResult(NamedTuple):
    """Result of a round, on the host."""

    token_ids: list[list[int]]
    """Emitted tokens of each decode."""
    num_valid: list[int]
    """Number of nodes of each decode's verified tree; 1 for a bare root."""
    chunk_token_ids: list[list[int]]
    """For each chunk, a list of one token, sampled after the chunk's last row; an empty list if the chunk does not
    sample.
    """
    path_nodes: np.ndarray
    """int64 [num_decodes, 1..max_path]: node indices of the root and the accepted nodes, padded with the last accepted
    node."""
    evidence: np.ndarray | None = None
    """int64 [num_decodes, num_nodes]: see `AcceptedPaths.evidence`."""
    logprobs: np.ndarray | None = None
    """int64 [1..num_decodes, 1..max_path, n]: log-probabilities, packed as by `runtime.round.choice`;
    `RoundInFlight.asking` maps a decode to its row."""
    chunk_logprobs: np.ndarray | None = None
    """int64 [num_sampling_chunks + num_prompt_tokens, n], packed like `logprobs`."""
    reported: np.ndarray | None = None
    """float64 [num_reported_chunks, n]: one row of values for each chunk with a `report`."""


@dataclass
class RoundTimes:
    """Host seconds of a round. All fields are filled in by the time at which the round is settled."""

    forward_s: float
    """Seconds of the verifier's forward pass; on an accelerator, seconds to enqueue the pass."""
    draft_s: float = 0.0
    """Seconds for which the host waited for the drafter's trees and did no other work."""
    publish_s: float = 0.0
    """Seconds of publishing outcomes to the drafter since the previous round was settled."""
    host_s: float = 0.0
    """Seconds of all other host work since the previous round was settled."""


@dataclass
class RoundInFlight:
    """A launched round."""

    plan: SchedulerOutput
    epochs: list[int]
    """Epoch of each decode's sequence at launch, then of each chunk's. If a sequence's epoch has changed since then,
    the sequence has left its slot, and the result of its row is dropped.
    """
    decodes: AcceptedPaths
    sampled: Tensor
    """int64 [num_sampling_chunks]: token sampled after each chunk that samples."""
    chunk_taps: Tensor | None
    """Taps [num_chunk_tokens, taps_size] of the chunks, in the order of the plan."""
    times: RoundTimes
    download: Download
    downloaded_names: tuple[str, ...] = ()
    """Names of the tensors in `download`, in order."""
    asking: dict[int, int] = field(default_factory=dict)
    """Row in `RoundResult.logprobs` of each decode whose request wants token reports; keys are decodes."""
    num_targets: list[int] = field(default_factory=list)
    """Number of each chunk's prompt tokens whose log-probabilities are in the result."""
    by_text: list[bool] = field(default_factory=list)
    """Whether each decode's tree was built from earlier text."""
    has_drafted: bool = False
    """Whether the round itself committed its tokens to the drafter and left the next trees in the inbox."""
    result: RoundResult | None = None
    """Result of the round; None until the host has received the result."""
    live: list[bool] = field(default_factory=list)
    """Whether a row's sequence is still in its slot and takes the row's result: for each decode, then for each chunk.
    `settle` fills the list."""

    def wait(self) -> RoundResult:
        """Waits for the device and returns the result. No other function makes the host wait for a round."""
        if self.result is None:
            self.result = self._result()
        return self.result

    def settle(self) -> RoundResult:
        """Returns the result and fills in `live`; called when the sequences take the result's tokens."""
        result, plan = self.wait(), self.plan
        self.live = [epoch == then for epoch, then in zip(epochs_of(plan), self.epochs, strict=True)]
        return result

    def report(self, result: RoundResult) -> None:
        """Passes log-probabilities and prompt reports to the sequences whose requests ask for these."""
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
        """Number of tokens that a decode emitted; 1, the minimum, while the result has not arrived."""
        return 1 if self.result is None else len(self.result.token_ids[row])

    def tokens_by_slot(self) -> dict[int, list[int]]:
        """Returns the emitted tokens of decodes and of chunks that sample, by slot. The result must have arrived."""
        decoded = zip(self.plan.decodes, self.result.token_ids, strict=True)
        sampled = (
            (chunk.seq, ids) for chunk, ids in zip(self.plan.chunks, self.result.chunk_token_ids, strict=True) if ids
        )
        return {seq.slot: token_ids for seq, token_ids in (*decoded, *sampled)}

    def _result(self) -> RoundResult:
        told = dict(zip(self.downloaded_names, self.download.wait(), strict=True))
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
    """Observer of an engine's rounds, called on the engine's thread.

    Rounds are settled in the order in which they were launched.
    """

    def launched(self, flight: RoundInFlight) -> None:
        """Called once a round is enqueued, before the next round is enqueued."""

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Called when the result of the oldest round in flight has arrived, before the sequences take the tokens."""

    def abandoned(self) -> None:
        """Called when the rounds in flight will never be settled, because their sequences are recomputed."""

    def ended(self, request_id: str) -> None:
        """Called when a request has finished, failed or was aborted."""

    def renewed(self) -> None:
        """Called when the verifier's weights were replaced; no round is in flight."""


NO_VALUES: Mapping[str, Tensor] = {}


class FirstTokens(NamedTuple):
    """Results of a round's prompt chunks, on the device."""

    sampled: Tensor
    """int64 [num_sampling_chunks]: token sampled after each chunk that samples."""
    taps: Tensor | None = None
    """Taps [num_chunk_tokens, taps_size] of the chunks, in the order of the plan."""
    logprobs: Tensor | None = None
    """See `RoundResult.chunk_logprobs`."""
    reported_values: Mapping[str, Tensor] = NO_VALUES
    """Tensors that `Feature.reported_values` of all features returned."""


def epochs_of(plan: SchedulerOutput) -> list[int]:
    """Returns the current epochs of the plan's sequences, in the order of `RoundInFlight.epochs`."""
    return [seq.epoch for seq in plan.decodes] + [chunk.seq.epoch for chunk in plan.chunks]


def launched_round(
    plan: SchedulerOutput,
    epochs: list[int],
    accepted: AcceptedPaths,
    first: FirstTokens,
    forward_s: float,
    asking: list[int] | None = None,
) -> RoundInFlight:
    """Creates the record of an enqueued round and starts the download of its result.

    Args:
        forward_s: host seconds in the forward pass.
        asking: decodes that have a row in `accepted.logprobs`; None if all decodes have a row.
    """
    told = accepted.downloads()
    if accepted.packed is None:
        told |= {"sampled": first.sampled} | ({} if first.logprobs is None else {"chunk_logprobs": first.logprobs})
        told |= first.reported_values
    rows = range(len(plan.decodes)) if asking is None else asking
    return RoundInFlight(
        plan=plan,
        epochs=epochs,
        decodes=accepted,
        sampled=first.sampled,
        chunk_taps=first.taps,
        times=RoundTimes(forward_s),
        download=Download(list(told.values()), accepted.packed, stays=asking is not None),
        downloaded_names=tuple(told),
        asking={row: index for index, row in enumerate(rows) if plan.decodes[row].reports is not None},
        num_targets=[len(chunk.prompt_targets()) for chunk in plan.chunks],
        by_text=plan.with_texts(),
    )
