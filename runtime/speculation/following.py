"""Which requests a drafter is told of: all, or a few while plain decoding wins.

A drafter that takes in prompts and tokens which no draft follows costs time of its own, on CPUs that of the verifier's
cores. Some requests are followed all the same, until a probe has been made, or none could show that drafts pay again.
"""

_SURE = 256
"""Rounds by which plain decoding has to be ahead for requests to go unfollowed."""
_BACK, _LAST_BACK = 64, 1024
"""Rounds in a row whose drafts would pay after which all are followed again; a few now and then are no reason. Twice as
many each time that plain decoding has won once more, until drafts pay for `_SURE` rounds in a row."""
_ONE_OF, _MOST_OF = 8, 64
"""Requests, of which the first is followed while plain decoding wins: twice as many after each probe that has lost."""


class Following:
    """Decides by what the policy decides, round by round, and by counting requests: nothing is left to chance."""

    def __init__(self) -> None:
        self.follows_all = True
        """Whether every request that may be drafted for is followed."""
        self._ahead = 0.0
        """Rounds by which plain decoding is ahead, at most `_SURE`; negative never."""
        self._back, self._num_paid = _BACK // 2, 0
        """Half of what it is to be once plain decoding has won; rounds in a row in which drafts would pay."""
        self._num_asked, self._one_of = 0, _ONE_OF

    def decided(self, pays: bool, num_rounds: int = 1) -> None:
        """Note some rounds, and whether drafts for all would pay in them."""
        step = -_SURE / self._back if pays else 1.0
        self._ahead = min(max(self._ahead + step * num_rounds, 0.0), float(_SURE))
        self._num_paid = self._num_paid + num_rounds if pays else 0
        if self._num_paid >= _SURE:
            self._back = _BACK // 2
        if self._ahead == _SURE and self.follows_all:
            self.follows_all, self._back = False, min(2 * self._back, _LAST_BACK)
        elif not self._ahead and not self.follows_all:
            self.follows_all, self._num_asked, self._one_of = True, 0, _ONE_OF

    def takes_next(self) -> bool:
        """Whether the request that is admitted now is followed."""
        if self.follows_all:
            return True
        self._num_asked += 1
        return self._num_asked % self._one_of == 1

    def lost(self) -> None:
        """Drafts for those that are followed have shown, while not all are, that plain decoding is better still."""
        self._one_of, self._num_asked = min(2 * self._one_of, _MOST_OF), 1

    @property
    def patience(self) -> int:
        """How many times as long as at first a probe waits for somebody to draft for."""
        return self._one_of // _ONE_OF
