"""Keeps what rounds did for the requests that ask to see it: their trees, and which nodes were accepted."""

from collections import deque

from wingbeat.runtime.protocol.transfer import Download
from wingbeat.runtime.scheduling.request import RequestOutput, VerifiedRound
from wingbeat.runtime.verifier.round import RoundInFlight, RoundObserver, RoundResult


class ShownRounds(RoundObserver):
    """Shows rounds to the requests that have `trace`. Where there are none it looks at nothing."""

    def __init__(self) -> None:
        self._request_ids: set[str] = set()
        self._downloads: deque[Download | None] = deque()
        """By round in flight, oldest first: its trees, where one of its requests asks."""
        self._settled: dict[str, VerifiedRound] = {}
        """Of the round settled last, before its sequences have taken its tokens."""

    def launched(self, flight: RoundInFlight) -> None:
        """Note who asks, and fetch the trees: the next round may write where they lie."""
        plan, paths = flight.plan, flight.decodes
        if plan.admitted:
            self._request_ids |= {seq.request.request_id for seq in plan.admitted if seq.request.params.trace}
        wanted = self._request_ids and paths.tree_parents is not None
        if wanted and any(seq.request.params.trace for seq in plan.decodes):
            self._downloads.append(Download([paths.tree_token_ids, paths.tree_parents]))
        else:
            self._downloads.append(None)

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Read the rows of the requests that ask."""
        self._settled.clear()
        download = self._downloads.popleft()
        if download is None:
            return
        token_ids, parents = download.wait()
        for row, seq in enumerate(flight.plan.decodes):
            num_nodes = result.num_valid[row]
            if not seq.request.params.trace or not flight.live[row] or num_nodes == 1:
                continue
            num_tokens = len(result.token_ids[row])
            self._settled[seq.request.request_id] = VerifiedRound(
                token_ids=(),
                tree_token_ids=tuple(token_ids[row, :num_nodes].tolist()),
                tree_parents=tuple(parents[row, :num_nodes].tolist()),
                accepted_nodes=tuple(result.path_nodes[row, 1:num_tokens].tolist()),
            )

    def with_rounds(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs of the round settled last, with that round where it was asked for."""
        if not self._request_ids:
            return outputs
        return [self._with_round(output) for output in outputs]

    def abandoned(self) -> None:
        """Their sequences are computed again."""
        self._downloads.clear()

    def ended(self, request_id: str) -> None:
        """Nothing more comes for it."""
        self._request_ids.discard(request_id)

    def _with_round(self, output: RequestOutput) -> RequestOutput:
        if output.request_id not in self._request_ids:
            return output
        seen = self._settled.get(output.request_id, VerifiedRound(()))
        return output._replace(rounds=(seen._replace(token_ids=output.token_ids),))
