"""Keeps what rounds did for the requests that ask to see it: trees and what was accepted, or why there are none."""

from collections import deque
from typing import NamedTuple

from wingbeat.runtime.engine.drafter_client import DrafterClient
from wingbeat.runtime.engine.plain_reason import NoTree, plain_reason
from wingbeat.runtime.protocol.transfer import Download
from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver, RoundResult
from wingbeat.runtime.scheduling.request import RequestOutput, VerifiedRound


class _Asked(NamedTuple):
    """What a round in flight shows."""

    plain_reasons: dict[int, str]
    """By decode that asks: why it has no tree, should it have none."""
    trees: Download | None
    """None where all are bare roots."""


class ShownRounds(RoundObserver):
    """Shows rounds to the requests that have `trace`. Where there are none it looks at nothing.

    Args:
        drafting: asked why nothing was drafted.
    """

    def __init__(self, drafting: DrafterClient) -> None:
        self._drafting = drafting
        self._request_ids: set[str] = set()
        self._asked: deque[_Asked | None] = deque()
        """By round in flight, oldest first; None where none of its decodes asks."""
        self._settled: dict[str, VerifiedRound] = {}
        """Of the round settled last, before its sequences have taken its tokens."""

    def launched(self, flight: RoundInFlight) -> None:
        """Note who asks, and fetch the trees: the next round may write where they lie."""
        plan, paths = flight.plan, flight.decodes
        if plan.admitted:
            self._request_ids |= {seq.request.request_id for seq in plan.admitted if seq.request.params.trace}
        rows = [row for row, seq in enumerate(plan.decodes) if seq.request.params.trace] if self._request_ids else []
        reasons = {row: plain_reason(self._drafting, plan, plan.decodes[row : row + 1]) for row in rows}
        has_trees = reasons and paths.tree_parents is not None
        trees = Download([paths.tree_token_ids, paths.tree_parents]) if has_trees else None
        self._asked.append(_Asked(reasons, trees) if reasons else None)

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Read the rows of the requests that ask."""
        self._settled.clear()
        asked = self._asked.popleft()
        if asked is None:
            return
        token_ids, parents = (None, None) if asked.trees is None else asked.trees.wait()
        for row, reason in asked.plain_reasons.items():
            if not flight.live[row]:
                continue
            seen, num_nodes = VerifiedRound((), plain_reason=reason), result.num_valid[row]
            if num_nodes > 1:
                num_tokens = len(result.token_ids[row])
                seen = VerifiedRound(
                    token_ids=(),
                    tree_token_ids=tuple(token_ids[row, :num_nodes].tolist()),
                    tree_parents=tuple(parents[row, :num_nodes].tolist()),
                    accepted_nodes=tuple(result.path_nodes[row, 1:num_tokens].tolist()),
                )
            self._settled[flight.plan.decodes[row].request.request_id] = seen

    def with_rounds(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs of the round settled last, with that round where it was asked for."""
        if not self._request_ids:
            return outputs
        return [self._with_round(output) for output in outputs]

    def abandoned(self) -> None:
        """Their sequences are computed again."""
        self._asked.clear()

    def ended(self, request_id: str) -> None:
        """Nothing more comes for it."""
        self._request_ids.discard(request_id)

    def _with_round(self, output: RequestOutput) -> RequestOutput:
        if output.request_id not in self._request_ids:
            return output
        seen = self._settled.get(output.request_id, VerifiedRound((), plain_reason=NoTree.PROMPT.value))
        return output._replace(rounds=(seen._replace(token_ids=output.token_ids),))
