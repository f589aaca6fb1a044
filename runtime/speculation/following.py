"""Which requests a drafter is told of: all, or a few while plain decoding wins.

A drafter that takes in prompts and tokens which no draft follows costs time of its own, on CPUs that of the verifier's
cores. Some requests are followed all the same, or no probe could show that drafts pay again.
"""

from wingbeat.runtime.speculation.policy import HOLD

SURE = 12 * HOLD
"""Rounds by which plain decoding has to be ahead for requests to go unfollowed; each round that drafts would pay takes
four of them back."""
ONE_OF = 2 * HOLD
"""Requests from one that is followed while plain decoding wins to the next one."""


class Following:
    """Decides by what the policy decides, round by round, and by counting requests: nothing is left to chance."""

    def __init__(self) -> None:
        self.follows_all = True
        """Whether every request that may be drafted for is followed."""
        self._ahead = 0
        """Rounds by which plain decoding is ahead, at most `SURE`; negative never."""
        self._left = 0
        """Requests until one is followed while not all are."""

    def decided(self, pays: bool, num_rounds: int = 1) -> None:
        """Note some rounds, and whether drafts for all would pay in them."""
        self._ahead = min(max(self._ahead + (-4 if pays else 1) * num_rounds, 0), SURE)
        if self._ahead == SURE:
            self.follows_all = False
        elif not self._ahead:
            self.follows_all, self._left = True, 0

    def takes_next(self) -> bool:
        """Whether the request that is admitted now is followed."""
        if self.follows_all:
            return True
        self._left = (self._left or ONE_OF) - 1
        return self._left == ONE_OF - 1
