"""Is a candidate better than the head that is served? A test that may be looked at after every observation.

Observation s is a held-out request, which both heads have drafted for, with new_s and old_s tokens per round, each
between 1 and n, the drafted tokens and one more. Their inverses are rounds per token, which is what a text takes:

    y_s = (1 / old_s - (1 + margin) / new_s) / max(1 + margin - 1 / n, 1 - (1 + margin) / n),    -1 <= y_s <= 1

Nothing is cut off, so that rare large losses count as what they are. What is to be refuted is E[y] <= 0: that the
candidate saves no rounds. The evidence against it is the capital of a gambler who bets on y > 0:

    K_t = product over s <= t of (1 + b_s y_s),    b_s = clip(m_s / (v_s + m_s^2), 0, 0.9)

with m_s and v_s the mean and the variance of what came before s, each with a first guess of m = 0.02 and v = 0.02 that
weighs as one observation. An observation multiplies the capital by 1.9 at most, so no few requests decide. While
E[y] <= 0, K is a supermartingale that begins at 1, so P(K ever reaches 1 / a) <= a (Ville): looking at it
after each observation costs nothing. Source: I. Waudby-Smith and A. Ramdas, "Estimating means of bounded random
variables by betting" (2024), section 4.

Candidate number k is promoted at K >= 1 / a_k, with a_k = 0.01 / (k (k + 1)). These add up to 0.01: that any candidate
ever is promoted that is not better has a probability of at most 1 %. The mirrored bet, on y < 0, ends a hopeless test.

An average hides those who lose behind those who gain. So requests are in groups, and in each of them the candidate must
pass the same test with margin -0.08 and a = 0.01: a group that loses 8 % or more is let through with a probability of
at most 1 %, however much the others gain.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from wingbeat.runtime.learning.shadow import Drafted

ERROR = 0.01
"""Probability of ever promoting a candidate that is not better."""
MOST_LOSS, GROUP_ERROR = 0.08, 0.01
"""By how much a group of requests may lose, and the probability of promoting a candidate by which one loses as much."""
MOST_BET = 0.9
_GUESS_MEAN, _GUESS_VARIANCE = 0.02, 0.02
BUCKET_FLOOR, BUCKET_LEAST = 0.98, 8
"""Tokens per round of the served head that a candidate must have in every bucket of context; and held-out requests that
a bucket needs before it is looked at."""


class Verdict(StrEnum):
    """What a test has come to."""

    OPEN = "open"
    BETTER = "better"
    NOT_BETTER = "not better"


class Bets:
    """Evidence that the mean of observations in [-1, 1] is above 0."""

    def __init__(self) -> None:
        self.log_capital = 0.0
        self._count, self._sum, self._squares = 1, _GUESS_MEAN, _GUESS_VARIANCE + _GUESS_MEAN**2

    def see(self, value: float) -> None:
        """One observation more."""
        mean = self._sum / self._count
        # v + m^2 is the mean square.
        bet = min(max(mean / (self._squares / self._count), 0.0), MOST_BET)
        self.log_capital += math.log1p(bet * value)
        self._count, self._sum, self._squares = self._count + 1, self._sum + value, self._squares + value**2


class PairedTest:
    """A test of one candidate against the served head.

    Args:
        margin: by which the candidate has to be better; below 0, what it may lose.
        most: tokens of a round at most: those of a chain, and one more.
        error: probability of finding better what is not.
    """

    def __init__(self, margin: float, most: int, error: float) -> None:
        self._margin, self.error = margin, error
        self._range = max(1 + margin - 1 / most, 1 - (1 + margin) / most)
        self._better, self._worse = Bets(), Bets()

    def see(self, new: float, old: float) -> None:
        """Tokens per round of a held-out request by either head."""
        value = (1 / old - (1 + self._margin) / new) / self._range
        self._better.see(value)
        self._worse.see(-value)

    @property
    def verdict(self) -> Verdict:
        """So far."""
        if self._better.log_capital >= -math.log(self.error):
            return Verdict.BETTER
        return Verdict.NOT_BETTER if self._worse.log_capital >= -math.log(ERROR) else Verdict.OPEN


def error_of(number: int) -> float:
    """Error of the test of candidate `number` among all there were, from 1 on; all of them add up to `ERROR`."""
    return ERROR / (number * (number + 1))


class Lengths(NamedTuple):
    """Tokens per round of both heads over the same requests."""

    new: float
    old: float
    requests: int


@dataclass
class Gate:
    """A candidate's test, overall, by group of requests, and by bucket of context."""

    number: int
    margin: float
    most: int
    """Tokens of a round at most."""
    num_groups: int = 1
    test: PairedTest = field(init=False)
    groups: list[PairedTest] = field(init=False)
    num_requests: int = 0
    _buckets: dict[int, list[float]] = field(default_factory=dict)
    """By bucket: requests, and the tokens per round of the new and of the old head, each summed over them."""

    def __post_init__(self) -> None:
        self.test = PairedTest(self.margin, self.most, error_of(self.number))
        self.groups = [PairedTest(-MOST_LOSS, self.most, GROUP_ERROR) for _ in range(self.num_groups)]

    def see(self, new: Drafted, old: Drafted, group: int | None = 0) -> None:
        """Count a held-out request of a group, or of none, for which both have drafted."""
        self.test.see(new.length, old.length)
        if group is not None:
            self.groups[group].see(new.length, old.length)
        self.num_requests += 1
        # A round of one head may begin in a bucket that the other's last one reached into.
        for bucket in new.rounds.keys() & old.rounds.keys():
            sums = self._buckets.setdefault(bucket, [0, 0.0, 0.0])
            sums[0] += 1
            sums[1] += new.tokens[bucket] / new.rounds[bucket]
            sums[2] += old.tokens[bucket] / old.rounds[bucket]

    def lengths(self) -> dict[int, Lengths]:
        """By bucket."""
        return {bucket: Lengths(new / n, old / n, int(n)) for bucket, (n, new, old) in sorted(self._buckets.items())}

    @property
    def verdict(self) -> Verdict:
        """So far."""
        return self._judged()[0]

    def decide(self) -> tuple[Verdict, str]:
        """The verdict so far, and why in words."""
        verdict, why = self._judged()
        said = "; ".join(
            f"context {bucket}: {one.new:.3f} tokens per round, {one.old:.3f} served, {one.requests} requests"
            for bucket, one in self.lengths().items()
        )
        return verdict, f"{why}: {said}"

    def _judged(self) -> tuple[Verdict, str]:
        by_group = [test.verdict for test in self.groups]
        if Verdict.NOT_BETTER in by_group:
            group = by_group.index(Verdict.NOT_BETTER)
            return Verdict.NOT_BETTER, f"group {group} of requests loses {MOST_LOSS:.0%} or more"
        match self.test.verdict:
            case Verdict.NOT_BETTER:
                return Verdict.NOT_BETTER, f"not better by {self.margin:.0%}"
            case Verdict.OPEN:
                return Verdict.OPEN, "no evidence either way"
        if unclear := by_group.count(Verdict.OPEN):
            return Verdict.OPEN, f"better, but perhaps not for {unclear} of {self.num_groups} groups of requests"
        for bucket, one in self.lengths().items():
            if one.requests >= BUCKET_LEAST and one.new < BUCKET_FLOOR * one.old:
                return Verdict.NOT_BETTER, f"worse in the bucket of context {bucket}"
        return Verdict.BETTER, f"better by {self.margin:.0%} with error {self.test.error:.1e}"
