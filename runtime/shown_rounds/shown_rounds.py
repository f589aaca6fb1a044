"""Records the rounds of requests that have `trace`, with the trees that were verified."""

from collections import deque
from typing import NamedTuple

from wingbeat.runtime.engine.drafter_client import DrafterClient
from wingbeat.runtime.engine.round_counts import NoTree, plain_reason
from wingbeat.runtime.protocol.transfer import Download
from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver, RoundResult
from wingbeat.runtime.scheduling.request import RequestOutput, VerifiedRound


class _Asked(NamedTuple):
    """Rows of one round in flight whose requests have `trace`."""

    plain_reasons: dict[int, str]
    """Reason to report if a decode has no tree, by decode row of requests with `trace`."""
    trees: Download | None
    """Token ids and parents of all trees; None if all are bare roots."""


class ShownRounds(RoundObserver):
    """Records rounds for the requests that have `trace`; trees are not downloaded while there is no such request.

    Args:
        drafting: source of the reason why no tree was requested.
    """

    def __init__(self, drafting: DrafterClient) -> None:
        self._drafting = drafting
        self._request_ids: set[str] = set()
        self._asked: deque[_Asked | None] = deque()
        """Rows to record of each round in flight, oldest round first; None for a round in which no decode has `trace`.
        """
        self._settled: dict[str, VerifiedRound] = {}
        """Latest settled round of each request, by request id, until `with_rounds` attaches the round to an output."""

    def launched(self, flight: RoundInFlight) -> None:
        """Starts downloading the trees of traced requests.

        The download cannot start later, because the next round may overwrite the trees' buffers.
        """
        plan, paths = flight.plan, flight.decodes
        if plan.admitted:
            self._request_ids |= {seq.request.request_id for seq in plan.admitted if seq.request.params.trace}
        rows = [row for row, seq in enumerate(plan.decodes) if seq.request.params.trace] if self._request_ids else []
        reasons = {row: plain_reason(self._drafting, plan, plan.decodes[row : row + 1]) for row in rows}
        has_trees = reasons and paths.tree_parents is not None
        trees = Download([paths.tree_token_ids, paths.tree_parents]) if has_trees else None
        self._asked.append(_Asked(reasons, trees) if reasons else None)

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Stores the settled round of each traced request."""
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
        """Attaches the round settled last to the outputs of traced requests."""
        if not self._request_ids:
            return outputs
        return [self._with_round(output) for output in outputs]

    def abandoned(self) -> None:
        """Drops rounds in flight; their sequences are recomputed."""
        self._asked.clear()

    def ended(self, request_id: str) -> None:
        """Stops tracing a request that has ended."""
        self._request_ids.discard(request_id)

    def _with_round(self, output: RequestOutput) -> RequestOutput:
        if output.request_id not in self._request_ids:
            return output
        seen = self._settled.get(output.request_id, VerifiedRound((), plain_reason=NoTree.PROMPT.value))
        return output._replace(rounds=(seen._replace(token_ids=output.token_ids),))
