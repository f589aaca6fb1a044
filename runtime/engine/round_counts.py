"""What an engine's rounds verified, accepted and replayed, and why some of them verified no tree."""

from bisect import bisect_left
from collections import deque
from typing import Any

from wingbeat.runtime.engine.drafter_client import DrafterClient
from wingbeat.runtime.engine.plain_reason import plain_reason
from wingbeat.runtime.histogram import Histogram
from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver, RoundResult
from wingbeat.runtime.scheduling.speculation_metrics import SpeculationMetrics

CONTEXT_BOUNDS = (512, 2048, 8192, 32768, 131072)
"""Tokens of context: what one bucket ends with, the last one has no end."""
NODE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Nodes of a verified tree, its root not counted."""


class RoundCounter(RoundObserver):
    """Counts an engine's rounds.

    Args:
        drafting: asked why nothing was drafted.
        forced: acceptance is drawn from a profile.
    """

    def __init__(self, drafting: DrafterClient, forced: bool) -> None:
        self._drafting = drafting
        self._forced = forced
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.by_context = [SpeculationMetrics(forced_acceptance=self._forced) for _ in (*CONTEXT_BOUNDS, None)]
        self.tree_nodes = Histogram(NODE_BOUNDS)
        self.plain_rounds: dict[str, int] = {}
        self.num_replayed_tokens = 0
        self._reasons: deque[str] = deque()
        """Of the rounds launched and not settled."""

    @property
    def metrics(self) -> SpeculationMetrics:
        """Over all contexts."""
        whole = SpeculationMetrics(forced_acceptance=self._forced)
        for part in self.by_context:
            whole.add(part)
        return whole

    def launched(self, flight: RoundInFlight) -> None:
        """Count the context that is computed again, and keep what would explain a round without trees."""
        self.num_replayed_tokens += sum(chunk.length for chunk in flight.plan.chunks if chunk.replay)
        self._reasons.append(plain_reason(self._drafting, flight.plan, flight.plan.decodes))

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Count trees and accepted tokens, also with their requests."""
        reason, plain = self._reasons.popleft(), bool(result.num_valid)
        for row, num_valid in enumerate(result.num_valid):
            if num_valid > 1:
                plain = False
                if flight.live[row]:
                    self._count(flight, row, num_valid - 1, len(result.token_ids[row]) - 1)
        if plain:
            self.plain_rounds[reason] = self.plain_rounds.get(reason, 0) + 1

    def abandoned(self) -> None:
        """Rounds that are never settled verified nothing."""
        self._reasons.clear()

    def figures(self) -> dict[str, Any]:
        """The fields of `EngineStats` that are counted here."""
        return {
            "speculation": self.metrics,
            "num_spec_tokens": self._drafting.config.speculation.max_path - 1,
            "num_replayed_tokens": self.num_replayed_tokens,
            "plain_rounds": self.plain_rounds,
            "by_context": {_context_label(bucket): part for bucket, part in enumerate(self.by_context)},
            "tree_nodes": self.tree_nodes,
        }

    def _count(self, flight: RoundInFlight, row: int, num_nodes: int, num_accepted: int) -> None:
        seq = flight.plan.decodes[row]
        bucket = bisect_left(CONTEXT_BOUNDS, len(seq.token_ids))
        seq.metrics.record(num_nodes, num_accepted)
        self.by_context[bucket].record(num_nodes, num_accepted)
        self.tree_nodes.observe(num_nodes)


def _context_label(bucket: int) -> str:
    """`513-2048` for the bucket of contexts of so many tokens."""
    least = 1 if bucket == 0 else CONTEXT_BOUNDS[bucket - 1] + 1
    return f"{least}-{CONTEXT_BOUNDS[bucket]}" if bucket < len(CONTEXT_BOUNDS) else f"{least}-"
