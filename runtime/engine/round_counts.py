"""Counts rounds for metrics; also records why a round had no tree."""

from bisect import bisect_left
from collections import deque
from enum import StrEnum
from typing import Any

from wingbeat.runtime.engine.clocks import RoundClock
from wingbeat.runtime.engine.drafter_client import DrafterClient, DrafterState
from wingbeat.runtime.engine.speculation import Reason
from wingbeat.runtime.metrics import Histogram, SpeculationMetrics
from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver, RoundResult
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence


class NoTree(StrEnum):
    """Reason why no tree was verified, beside the policy's reasons (`runtime.engine.speculation.Reason`)."""

    PROMPT = "prompt"
    """The token was computed with its prompt, before a tree could be drafted."""
    NO_DRAFTER = "no_drafter"
    DRAFTER_LOST = "drafter_lost"
    DRAFTER_LATE = "drafter_late"
    """The drafter has not answered in time."""
    NOT_ASKED = "not_asked"
    """Every request asks for plain decoding."""
    NO_ROOM = "no_room"
    """No KV blocks were free for trees."""
    NOT_USABLE = "not_usable"
    """Trees were requested, but every received tree was outdated, malformed, or not worth verifying."""


WITHOUT_DRAFTER = {
    DrafterState.NONE: NoTree.NO_DRAFTER,
    DrafterState.LATE: NoTree.DRAFTER_LATE,
    DrafterState.LOST: NoTree.DRAFTER_LOST,
}


def plain_reason(drafting: DrafterClient, plan: SchedulerOutput, seqs: list[Sequence]) -> str:
    """Returns the reason to report if `seqs` verify no tree in the round that is being launched.

    The reason is a plain str, because the reason is sent to processes that do not import the enum's module.
    """
    if drafting.state is not DrafterState.ATTACHED:
        reason = WITHOUT_DRAFTER[drafting.state]
    elif not any(seq.request.params.speculation for seq in seqs):
        reason = NoTree.NOT_ASKED
    elif any(seq.draft.tree_requested and seq not in plan.without_room for seq in seqs):
        reason = NoTree.NOT_USABLE
    elif plan.without_room:
        reason = NoTree.NO_ROOM
    elif any(seq.request.params.force_drafts for seq in seqs):
        reason = Reason.IDLE  # such requests get drafts even at a loss, so a loss is not the reason
    else:
        reason = drafting.plain_reason
    return str(reason)


CONTEXT_BOUNDS = (512, 2048, 8192, 32768, 131072)
"""Upper bounds of context buckets in tokens, inclusive; the last bucket is unbounded."""
MOST_HEADS = 8
"""Maximum number of draft head versions that are counted separately."""
NODE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Histogram bounds for the number of nodes of a verified tree, not counting its root."""


class RoundCounter(RoundObserver):
    """Counts an engine's rounds.

    Args:
        drafting: source of the reason why no tree was requested.
        clock: source of the drafter's figures, such as its head version.
        forced: whether acceptance is drawn from a profile.
    """

    def __init__(self, drafting: DrafterClient, clock: RoundClock, forced: bool) -> None:
        self._drafting, self._clock = drafting, clock
        self._forced = forced
        self.reset()

    def reset(self) -> None:
        """Resets all counts."""
        self.by_context = [SpeculationMetrics(forced_acceptance=self._forced) for _ in (*CONTEXT_BOUNDS, None)]
        self.tree_nodes = Histogram(NODE_BOUNDS)
        self.plain_rounds: dict[str, int] = {}
        self.num_replayed_tokens = 0
        self.by_head: dict[int, list[int]] = {}
        """Four counts by head version. A sequence round is a round of one sequence. The counts are: sequence rounds
        with a tree, drafted tokens, accepted tokens, and the sum over sequence rounds of the squared number of accepted
        tokens."""
        self.by_text = [0, 0, 0]
        """Number of sequence rounds (rounds of one sequence) with a tree from earlier text, their drafted tokens, and
        their accepted tokens."""
        self._launched: deque[tuple[str, int]] = deque()
        """Two values for each round in flight: the reason to report if the round has no trees, and the version of the
        head that drafted its trees."""

    @property
    def metrics(self) -> SpeculationMetrics:
        """Metrics summed over all contexts."""
        whole = SpeculationMetrics(forced_acceptance=self._forced)
        for part in self.by_context:
            whole.add(part)
        return whole

    def launched(self, flight: RoundInFlight) -> None:
        """Counts replayed context tokens; stores the reason to report if the round turns out to have no trees."""
        self.num_replayed_tokens += sum(chunk.length for chunk in flight.plan.chunks if chunk.replay)
        reason = plain_reason(self._drafting, flight.plan, flight.plan.decodes)
        self._launched.append((reason, self._clock.drafter.head_version))

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Counts the round's trees and accepted tokens, for the engine and for each request."""
        (reason, version), plain = self._launched.popleft(), bool(result.num_valid)
        for row, num_valid in enumerate(result.num_valid):
            if num_valid > 1:
                plain = False
                if flight.live[row]:
                    self._count(flight, row, num_valid - 1, len(result.token_ids[row]) - 1, version)
        if plain:
            self.plain_rounds[reason] = self.plain_rounds.get(reason, 0) + 1

    def abandoned(self) -> None:
        """Drops rounds that will never be settled."""
        self._launched.clear()

    def figures(self) -> dict[str, Any]:
        """Returns those fields of `EngineStats` that this class counts."""
        return {
            "speculation": self.metrics,
            "num_spec_tokens": self._drafting.config.speculation.max_path - 1,
            "num_replayed_tokens": self.num_replayed_tokens,
            "plain_rounds": self.plain_rounds,
            "by_context": {_context_label(bucket): part for bucket, part in enumerate(self.by_context)},
            "tree_nodes": self.tree_nodes,
            "by_text": tuple(self.by_text),
            "by_head": {version: tuple(counts) for version, counts in self.by_head.items()},
            "head_version": self._clock.drafter.head_version,
        }

    def _count(self, flight: RoundInFlight, row: int, num_nodes: int, num_accepted: int, version: int) -> None:
        seq = flight.plan.decodes[row]
        bucket = bisect_left(CONTEXT_BOUNDS, len(seq.token_ids))
        seq.metrics.record(num_nodes, num_accepted)
        self.by_context[bucket].record(num_nodes, num_accepted)
        self.tree_nodes.observe(num_nodes)
        if flight.by_text[row]:
            self.by_text = [had + more for had, more in zip(self.by_text, (1, num_nodes, num_accepted), strict=True)]
            return
        counts = self.by_head.get(version)
        if counts is None:
            counts = self._new_head(version)
        counts[0] += 1
        counts[1] += num_nodes
        counts[2] += num_accepted
        counts[3] += num_accepted * num_accepted

    def _new_head(self, version: int) -> list[int]:
        """Adds counters for a version; removes the oldest version beyond MOST_HEADS."""
        if len(self.by_head) >= MOST_HEADS:
            del self.by_head[next(iter(self.by_head))]
        self.by_head[version] = [0, 0, 0, 0]
        return self.by_head[version]


def _context_label(bucket: int) -> str:
    """Label of a context bucket, such as `513-2048`."""
    least = 1 if bucket == 0 else CONTEXT_BOUNDS[bucket - 1] + 1
    return f"{least}-{CONTEXT_BOUNDS[bucket]}" if bucket < len(CONTEXT_BOUNDS) else f"{least}-"
