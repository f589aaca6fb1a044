"""Which requests a drafter is told of: all, or a few while plain decoding wins.

A drafter that takes in prompts and tokens which no draft follows costs time of its own, on CPUs that of the verifier's
cores. Some requests are followed all the same, or no probe could show that drafts pay again.
"""

_SURE = 256
"""Rounds by which plain decoding has to be ahead for requests to go unfollowed."""
_BACK = 32
"""Rounds in a row whose drafts would pay after which all are followed again; a few now and then are no reason."""
_ONE_OF, _MOST_OF = 8, 32
"""Requests from one that is followed while plain decoding wins to the next one, at first and at most: twice as many
each time, as the one before has shown nothing else."""


class Following:
    """Decides by what the policy decides, round by round, and by counting requests: nothing is left to chance."""

    def __init__(self) -> None:
        self.follows_all = True
        """Whether every request that may be drafted for is followed."""
        self._ahead = 0
        """Rounds by which plain decoding is ahead, at most `_SURE`; negative never."""
        self._left, self._one_of = 0, _ONE_OF // 2
        """Requests until one is followed while not all are; half of what lies between it and the one behind it."""

    def decided(self, pays: bool, num_rounds: int = 1) -> None:
        """Note some rounds, and whether drafts for all would pay in them."""
        step = -_SURE // _BACK if pays else 1
        self._ahead = min(max(self._ahead + step * num_rounds, 0), _SURE)
        if self._ahead == _SURE:
            self.follows_all = False
        elif not self._ahead and not self.follows_all:
            self.follows_all, self._left, self._one_of = True, 0, _ONE_OF // 2

    def takes_next(self) -> bool:
        """Whether the request that is admitted now is followed."""
        if self.follows_all:
            return True
        if self._left:
            self._left -= 1
            return False
        self._one_of = min(2 * self._one_of, _MOST_OF)
        self._left = self._one_of - 1
        return True

    @property
    def patience(self) -> int:
        """How many times as long as at first a probe waits for somebody to draft for."""
        return max(self._one_of // _ONE_OF, 1)
