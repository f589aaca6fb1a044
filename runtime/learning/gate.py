"""Sequential test whether a candidate head is better than the served head; may be evaluated after every observation.

Observation s is a held-out request for which both heads have drafted. The candidate has new_s tokens per round and the
served head old_s; both are between 1 and n, the number of drafted tokens plus one. The inverses of new_s and old_s
(rounds per token) are proportional to the time that a text takes:

    y_s = (1 / old_s - (1 + margin) / new_s) / max(1 + margin - 1 / n, 1 - (1 + margin) / n),    -1 <= y_s <= 1

The values of y are not clipped, so rare large losses count in full. The null hypothesis is E[y] <= 0: the candidate
saves no rounds. The evidence against it is the capital of a gambler who bets on y > 0:

    K_t = product over s <= t of (1 + b_s y_s),    b_s = clip(m_s / (v_s + m_s^2), 0, 0.9)

where m_s and v_s are the mean and the variance of the observations before s, including a first guess (m = 0.02, v =
0.02) with the weight of one observation. An observation multiplies the capital by at most 1.9, so a few requests cannot
decide. While E[y] <= 0, K is a supermartingale that begins at 1, so P(K ever reaches 1 / a) <= a (Ville): evaluating
the test after each observation does not raise its error. Source: I. Waudby-Smith and A. Ramdas, "Estimating means of
bounded random variables by betting" (2024), section 4.

Candidate number k is promoted at K >= 1 / a_k, with a_k = 0.01 / (k (k + 1)). All a_k add up to 0.01, so the
probability that a candidate that is not better is ever promoted is at most 1 %. A second gambler bets on y < 0 in the
same way; that gambler's capital ends a test in which the candidate is not better.

An average can hide requests that become slower behind requests that become faster. Requests are therefore divided into
groups, and in each group the candidate must pass the same test with margin -0.08 and a = 0.01: a candidate that slows a
group down by 8 % or more passes with a probability of at most 1 %, however much faster the other groups become.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from wingbeat.runtime.learning.shadow import Drafted

ERROR = 0.01
"""Upper bound of the probability that a candidate that is not better is ever promoted, over all candidates together."""
MOST_LOSS, GROUP_ERROR = 0.08, 0.01
"""Maximum relative loss of a group of requests, and maximum probability that a candidate with a larger loss is
promoted.
"""
MOST_BET = 0.9
_GUESS_MEAN, _GUESS_VARIANCE = 0.02, 0.02
BUCKET_FLOOR, BUCKET_LEAST = 0.98, 8
"""Tokens per round, relative to the served head, that a candidate must reach in each bucket of context length; and the
minimum number of held-out requests in a bucket for this check.
"""


class Verdict(StrEnum):
    """Outcome of a test so far."""

    OPEN = "open"
    BETTER = "better"
    NOT_BETTER = "not better"


class Bets:
    """Gambler who bets that the mean of observations in [-1, 1] is above 0. The logarithm of the gambler's capital is
    the evidence for a mean above 0.
    """

    def __init__(self) -> None:
        self.log_capital = 0.0
        self._count, self._sum, self._squares = 1, _GUESS_MEAN, _GUESS_VARIANCE + _GUESS_MEAN**2

    def see(self, value: float) -> None:
        """Adds an observation."""
        mean = self._sum / self._count
        # The mean of the squares equals v + m^2.
        bet = min(max(mean / (self._squares / self._count), 0.0), MOST_BET)
        self.log_capital += math.log1p(bet * value)
        self._count, self._sum, self._squares = self._count + 1, self._sum + value, self._squares + value**2


class PairedTest:
    """Test of one candidate against the served head.

    Args:
        margin: relative gain that the candidate must exceed; with a negative margin, a loss of that size is tolerated.
        most: maximum number of tokens of a round: the tokens of a chain plus the bonus token.
        error: maximum probability of the verdict "better" for a candidate that is not better.
    """

    def __init__(self, margin: float, most: int, error: float) -> None:
        self._margin, self.error = margin, error
        self._range = max(1 + margin - 1 / most, 1 - (1 + margin) / most)
        self._better, self._worse = Bets(), Bets()

    def see(self, new: float, old: float) -> None:
        """Adds a held-out request with the tokens per round of the candidate (`new`) and of the served head (`old`)."""
        value = (1 / old - (1 + self._margin) / new) / self._range
        self._better.see(value)
        self._worse.see(-value)

    @property
    def verdict(self) -> Verdict:
        """Verdict so far."""
        if self._better.log_capital >= -math.log(self.error):
            return Verdict.BETTER
        return Verdict.NOT_BETTER if self._worse.log_capital >= -math.log(ERROR) else Verdict.OPEN


def error_of(number: int) -> float:
    """Error probability allowed for the test of candidate `number` (from 1 on); these probabilities add up to `ERROR`
    over all candidates.
    """
    return ERROR / (number * (number + 1))


class Lengths(NamedTuple):
    """Mean tokens per round of the candidate and of the served head, over the same requests."""

    new: float
    old: float
    requests: int


@dataclass
class Gate:
    """Test of a candidate: over all requests, within each group of requests, and by bucket of context length."""

    number: int
    margin: float
    most: int
    """Maximum number of tokens of a round."""
    num_groups: int = 1
    test: PairedTest = field(init=False)
    groups: list[PairedTest] = field(init=False)
    num_requests: int = 0
    _buckets: dict[int, list[float]] = field(default_factory=dict)
    """By bucket: the number of requests, and the sums of the tokens per round of the candidate and of the served
    head.
    """

    def __post_init__(self) -> None:
        self.test = PairedTest(self.margin, self.most, error_of(self.number))
        self.groups = [PairedTest(-MOST_LOSS, self.most, GROUP_ERROR) for _ in range(self.num_groups)]

    def see(self, new: Drafted, old: Drafted, group: int | None = 0) -> None:
        """Adds a held-out request for which both heads have drafted; `group` is None if the request belongs to no
        group.
        """
        self.test.see(new.length, old.length)
        if group is not None:
            self.groups[group].see(new.length, old.length)
        self.num_requests += 1
        # A bucket is counted only if it contains rounds of both heads, because otherwise the heads cannot be compared
        # in the bucket.
        for bucket in new.rounds.keys() & old.rounds.keys():
            sums = self._buckets.setdefault(bucket, [0, 0.0, 0.0])
            sums[0] += 1
            sums[1] += new.tokens[bucket] / new.rounds[bucket]
            sums[2] += old.tokens[bucket] / old.rounds[bucket]

    def lengths(self) -> dict[int, Lengths]:
        """Mean tokens per round of both heads, by bucket of context length."""
        return {bucket: Lengths(new / n, old / n, int(n)) for bucket, (n, new, old) in sorted(self._buckets.items())}

    @property
    def verdict(self) -> Verdict:
        """Verdict so far."""
        return self._judged()[0]

    def decide(self) -> tuple[Verdict, str]:
        """Verdict so far, and the reason for it in words."""
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
