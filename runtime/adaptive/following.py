"""Selects the requests that a drafter follows: all of them, or a few while plain decoding is faster.

A drafter that processes prompts and tokens without drafting costs time, on CPUs time of the verifier's cores. A few
requests are followed all the same, because otherwise no probe could show that drafts pay again.
"""

from wingbeat.runtime.adaptive.policy import HOLD

SURE = 12 * HOLD
"""Rounds by which plain decoding must be ahead before requests go unfollowed; each round in which drafts would pay
subtracts four."""
ONE_OF = 2 * HOLD
"""While plain decoding is faster, one request out of this many is followed."""


class Following:
    """Selects followed requests deterministically, from the policy's decisions and a count of requests."""

    def __init__(self) -> None:
        self.follows_all = True
        """Whether every request that allows drafts is followed."""
        self._ahead = 0
        """Rounds by which plain decoding is ahead, 0..`SURE`."""
        self._left = 0
        """Requests until the next followed one, while not all are followed."""

    def decided(self, pays: bool, num_rounds: int = 1) -> None:
        """Records rounds, and whether drafting for all requests would have paid in them."""
        self._ahead = min(max(self._ahead + (-4 if pays else 1) * num_rounds, 0), SURE)
        if self._ahead == SURE:
            self.follows_all = False
        elif not self._ahead:
            self.follows_all, self._left = True, 0

    def takes_next(self) -> bool:
        """Whether the request being admitted is followed."""
        if self.follows_all:
            return True
        self._left = (self._left or ONE_OF) - 1
        return self._left == ONE_OF - 1
