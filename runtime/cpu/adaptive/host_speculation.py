"""Adaptive speculation with trees in host memory: chooses the nodes to verify after the trees arrive, and times
rounds.
"""

from typing import NamedTuple

import numpy as np
import torch

from wingbeat.kernels.cpu.drafted import NodeChoice
from wingbeat.runtime.adaptive.acceptance import EDGES, OF_TEXT, draft_kind
from wingbeat.runtime.adaptive.adaptive_speculation import NOT_ASKED, AdaptiveSpeculation, LaunchedRound, mean_context
from wingbeat.runtime.adaptive.curves import DraftTook, RoundTook
from wingbeat.runtime.adaptive.policy import SpeculationPolicy
from wingbeat.runtime.cpu.round.host_trees import HostTrees
from wingbeat.runtime.cpu.round.runner import HostRunner
from wingbeat.runtime.engine.speculation import DraftPlan, Reason
from wingbeat.runtime.protocol.messages import Outcome
from wingbeat.runtime.round.flight import RoundInFlight, RoundResult
from wingbeat.runtime.round.runner import ModelRunner
from wingbeat.runtime.scheduling.sequence import Sequence


class _Seen(NamedTuple):
    """Properties of a round and its trees, recorded at launch."""

    context: float
    """Mean number of tokens per sequence."""
    num_drafting: int = 0
    """Number of sequences with a tree from the drafter."""
    levels: int = 0
    """Number of levels of the drafter's trees."""
    num_context_tokens: int = 0
    """Number of context tokens that the drafter processed before drafting."""
    evidence: np.ndarray | None = None
    """Evidence on the round's trees, as in `RoundResult.evidence`; None if none is recorded."""


class HostSpeculation(AdaptiveSpeculation):
    """Chooses the nodes whose expected benefit exceeds the cost of their verification, across all trees of a round, and
    learns the costs of rounds.
    """

    fixed_widths = False

    def __init__(self, policy: SpeculationPolicy, pruner: None = None) -> None:
        super().__init__(policy, pruner)
        self._by = torch.from_numpy(self.acceptance.table), torch.from_numpy(EDGES)
        self._num_context_tokens = 0
        self._asks = False
        """Whether this round requests the drafts for the next round."""

    def plan(
        self, running: list[Sequence], proposals: list[Sequence], num_unfollowed: int = 0, num_rounds: int = 1
    ) -> DraftPlan:
        """See `Speculation.plan`."""
        plan = super().plan(running, proposals, num_unfollowed, num_rounds)
        self._asks = bool(plan.levels)
        return plan

    def made_of_text(self) -> DraftPlan:
        """See `Speculation.made_of_text`."""
        self._asks = False
        return super().made_of_text()

    def write_rule(self, plan: DraftPlan, outcome: Outcome, num_context_tokens: int) -> int:
        """See `Speculation.write_rule`."""
        self._num_context_tokens = num_context_tokens
        return super().write_rule(plan, outcome, num_context_tokens)

    def prune(self, trees: HostTrees | None, decodes: list[Sequence], drafted: HostTrees | None) -> HostTrees | None:
        """See `Speculation.prune`; returns None if no node is worth its verification."""
        self._asks = False
        # `drafted` and `trees` are the same object unless a grammar has added nodes. If a grammar has added nodes, the
        # drafter's trees have already been checked, so `checked` returns them.
        own = None if drafted is None or drafted is trees else drafted.checked()
        came = drafted is not None and (drafted is trees or own is not None)
        if not came and self._plan.reason == Reason.PROBE_PLAIN:
            # A probe with plain decoding lasts one round. The plan is reset here because without a drafter no other
            # plan replaces it.
            trees, self._plan = None, NOT_ASKED
        seen = _Seen(mean_context(decodes), num_context_tokens=self._num_context_tokens)
        taken = None if trees is None else trees.choose_nodes(self._choice(trees, decodes, seen.context))
        if taken is None:
            self._pruned = LaunchedRound(NOT_ASKED, len(decodes), [], [], [], seen)
            return None
        kinds = list(map(draft_kind, decodes))
        if drafted is trees:
            seen = seen._replace(num_drafting=taken.num_drafting, levels=taken.levels)
        elif own is not None:
            seen = seen._replace(num_drafting=int((own.num_valid > 1).sum()), levels=int(own.depths.max()))
        self._pruned = LaunchedRound(
            self._plan if came else NOT_ASKED,
            len(decodes),
            kinds,
            [drafted is not trees and bool(seq.certain(1)) for seq in decodes],
            [came and seq.draft.tree_requested for seq in decodes],
            seen._replace(evidence=taken.evidence.numpy()),
        )
        return None if taken.is_bare else trees

    def _choice(self, trees: HostTrees, decodes: list[Sequence], context: float) -> NodeChoice:
        num_reqs = len(decodes)
        kinds = list(map(draft_kind, decodes))
        by_text = not self._plan.levels and max(kinds) >= OF_TEXT
        prices_of = self.policy.text_prices if by_text else self.policy.prices
        prices = prices_of(num_reqs, num_reqs * trees.num_nodes, context)
        tokens = None if prices is None else torch.from_numpy(prices)
        forced = [seq.request.params.force_drafts for seq in decodes]
        return NodeChoice(*self._by, tokens, list(map(_useful_depth, decodes)), forced, kinds, self.policy.max_levels)

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """See `RoundObserver.settled`."""
        this = self._launched.popleft()
        if this.seen.evidence is not None:
            observes = self._is_observed(this)
            self._learn(this, this.seen.evidence, result.path_nodes, flight.live, observes=observes)
        if this.num_decodes:
            self._time(this, flight, result)

    def _time(self, this: LaunchedRound, flight: RoundInFlight, result: RoundResult) -> None:
        times, draft, seen, num_extra = flight.times, None, this.seen, sum(result.num_valid) - len(result.num_valid)
        if this.plan.levels:
            draft = DraftTook(times.draft_s, seen.num_drafting, seen.levels, seen.num_context_tokens)
        num_chunk_tokens = sum(chunk.length for chunk in flight.plan.chunks)
        seconds = times.forward_s + times.host_s + times.publish_s
        took = RoundTook(seconds, this.num_decodes, num_extra, seen.context, num_chunk_tokens, draft, self._asks)
        self.policy.costs.observe(took)
        if draft is None and any(flight.by_text):
            self.policy.saw_text(seconds, sum(map(len, result.token_ids)), num_extra)


def host_speculation(runner: ModelRunner) -> type[HostSpeculation] | None:
    """Adaptive speculation of a runner's rounds; None for rounds on other devices."""
    return HostSpeculation if isinstance(runner, HostRunner) else None


def _useful_depth(seq: Sequence) -> int:
    """Number of levels of a tree whose tokens the request can still emit before max_tokens. One of the tokens that
    remain until max_tokens is the bonus token, which is not part of the tree.
    """
    return max(seq.request.params.max_tokens - (seq.min_len - seq.num_prompt_tokens) - 1, 0)
