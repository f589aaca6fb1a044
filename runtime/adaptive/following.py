"""Selects the requests that a drafter follows: all requests, or a few while plain decoding is faster.

Following a request costs time even without drafting, because the drafter processes the request's prompt and tokens; on
CPUs, this work uses the verifier's cores. A few requests are nevertheless always followed, because otherwise no probe
could show that drafts pay again.
"""

from wingbeat.runtime.adaptive.policy import HOLD

SURE = 12 * HOLD
"""Lead of plain decoding, in rounds, from which requests are no longer followed. A round in which drafts would not pay
adds 1 to the lead; a round in which drafts would pay subtracts 4."""
ONE_OF = 2 * HOLD
"""While plain decoding is faster, the drafter follows one request out of this many."""


class Following:
    """Selects followed requests deterministically, from the policy's decisions and a count of requests."""

    def __init__(self) -> None:
        self.follows_all = True
        """Whether every request that allows drafts is followed."""
        self._ahead = 0
        """Lead of plain decoding, in rounds, from 0 to `SURE`."""
        self._left = 0
        """Number of requests until the next request that is followed, while not all requests are followed."""

    def decided(self, pays: bool, num_rounds: int = 1) -> None:
        """Records `num_rounds` rounds, and whether drafting for all requests would have paid in these rounds."""
        self._ahead = min(max(self._ahead + (-4 if pays else 1) * num_rounds, 0), SURE)
        if self._ahead == SURE:
            self.follows_all = False
        elif not self._ahead:
            self.follows_all, self._left = True, 0

    def takes_next(self) -> bool:
        """Returns whether to follow the request that is being admitted; called once per request."""
        if self.follows_all:
            return True
        self._left = (self._left or ONE_OF) - 1
        return self._left == ONE_OF - 1
