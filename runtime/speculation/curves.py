"""Costs of rounds: one curve of the verifier's passes and one of drafts, each held against what rounds really took.

A curve is measured at a few points when an engine starts, and goes straight between them. It is right about shapes and
may be wrong about the minute: each kind of round (plain, behind a draft, the draft itself) has a factor on its curve,
the average of what such rounds of such a batch took, which fades with the rounds. Seconds throughout.
"""

import math
from typing import NamedTuple

import numpy as np

FADE = 1.0 / 24
"""Share by which what was seen counts less with every round."""


class PassCurve(NamedTuple):
    """Seconds of the verifier's passes."""

    rows: tuple[int, ...]
    """Measured passes, ascending."""
    short_s: tuple[float, ...]
    """Seconds of passes of so many rows at a short context."""
    context_s: tuple[float, float] = (0.0, 0.0)
    """Added by a token of context of one sequence: with one row of that sequence, and by each further row of it."""

    def seconds(self, num_reqs: int, num_extra: np.ndarray, context: float) -> np.ndarray:
        """Seconds of passes over `num_reqs` roots and `num_extra` [n] drafted nodes in all: float64 [n].

        Args:
            context: tokens per sequence.
        """
        extra = np.asarray(num_extra, dtype=np.float64)
        rows, last = num_reqs + extra, len(self.rows) - 1
        short_s = np.interp(rows, self.rows, self.short_s)
        if last:  # beyond the curve each row adds what the last ones did
            slope = (self.short_s[last] - self.short_s[last - 1]) / (self.rows[last] - self.rows[last - 1])
            short_s += max(slope, 0.0) * np.maximum(rows - self.rows[last], 0.0)
        return short_s + context * (self.context_s[0] * num_reqs + self.context_s[1] * extra)

    @property
    def row_s(self) -> float:
        """Added by a row of a large pass, as by a token of a prompt."""
        return max(self.short_s[-1] - self.short_s[0], 0.0) / max(self.rows[-1] - self.rows[0], 1)


class DraftCurve(NamedTuple):
    """Seconds until trees are there, from the moment that they are asked for."""

    num_reqs: tuple[int, ...]
    """Measured batches, ascending: the smallest and the largest."""
    base_s: tuple[float, ...]
    """By batch: beside the levels."""
    level_s: tuple[float, ...]
    """By batch: of each level."""
    context_s: float = 0.0
    """Added to a level by a token of context of one sequence."""

    def seconds(self, num_reqs: int, levels: np.ndarray | int, context: float) -> np.ndarray:
        """Seconds of drafts of `levels` [n] levels: float64 [n]."""
        base_s, level_s = (np.interp(num_reqs, self.num_reqs, part) for part in (self.base_s, self.level_s))
        return base_s + np.asarray(levels) * (level_s + self.context_s * num_reqs * context)

    @property
    def row_s(self) -> float:
        """Added by a token that the drafter takes in first."""
        return max(self.level_s[-1] - self.level_s[0], 0.0) / max(self.num_reqs[-1] - self.num_reqs[0], 1)


class Factor:
    """Average of real seconds over a curve's; rounds count the less, the longer they are ago."""

    def __init__(self) -> None:
        self.value = 1.0
        self._weight = self._variance = 0.0
        self._seen_at = 0

    def observe(self, ratio: float, now: int) -> None:
        """Note one round.

        Args:
            now: number of the round.
        """
        # A round of many times the usual length is an interruption and not a cost, and trees that had come before they
        # were waited for cost something all the same.
        most = 2.0 if self._weight else 10.0
        ratio = min(max(ratio, self.value / most), self.value * most)
        self._weight *= (1.0 - FADE) ** (now - self._seen_at)
        self._weight, self._seen_at = self._weight + 1.0, now
        error, share = ratio - self.value, 1.0 / self._weight
        self.value += share * error
        self._variance = (1.0 - share) * (self._variance + share * error**2)

    @property
    def doubt(self) -> float:
        """Standard error of the value, as a share of it."""
        return math.sqrt(self._variance / max(self._weight, 1.0)) / self.value


class Factors:
    """A factor for each power of two of the requests."""

    def __init__(self) -> None:
        self._by_power: dict[int, Factor] = {}

    def at(self, num_reqs: int) -> Factor | None:
        """Factor of the nearest batch that was seen; None where none was."""
        power = num_reqs.bit_length()
        nearest = min(self._by_power, key=lambda seen: abs(seen - power), default=None)
        return None if nearest is None else self._by_power[nearest]

    def observe(self, num_reqs: int, ratio: float, now: int) -> None:
        """Note one round of so many requests."""
        power = num_reqs.bit_length()
        if power not in self._by_power:
            self._by_power[power] = Factor()
        self._by_power[power].observe(ratio, now)


class DraftTook(NamedTuple):
    """Draft that a round had waited for before it ran."""

    seconds: float
    num_reqs: int
    """Sequences that trees came for; 0 where none came in time or the host has not seen them."""
    levels: int
    num_chunk_tokens: int = 0
    """Context that the drafter took in first."""


class RoundTook(NamedTuple):
    """A round that really ran."""

    seconds: float
    """Without its wait for trees."""
    num_reqs: int
    num_extra: int
    """Drafted nodes."""
    mean_context: float
    num_chunk_tokens: int = 0
    """Rows of prompts."""
    draft: DraftTook | None = None
    """None in a plain round."""
    asks: bool = False
    """Beside it a draft was asked for."""


class RoundCosts:
    """Predicts rounds without prompts: a prompt takes its time however the tokens behind it are decoded.

    A round behind a draft runs beside the drafter, on contended cores, tells it what was accepted and plans anew, so
    that one without a node takes longer than a plain round among plain rounds.
    """

    def __init__(self, passes: PassCurve, drafts: DraftCurve) -> None:
        self.passes, self.drafts = passes, drafts
        self._plain, self._verify, self._draft, self._text = (Factors() for _ in range(4))
        self._passes_s: dict[int, float] = {}
        """Seconds at a short context of passes that were seen, by rows: every round asks for one."""
        self._drafts_s: dict[tuple[int, int], tuple[float, float]] = {}
        """Seconds of drafts that were seen, by requests and levels: at a short context, and by token of context."""
        self._round = 0
        self._before = self._verify
        """What the latest round was counted as."""

    def plain_s(self, num_reqs: int, context: float) -> float:
        """Time of a plain round behind plain rounds; as one behind a draft takes, until one was seen."""
        factor = self._plain.at(num_reqs) or self._verify.at(num_reqs)
        return float(self.passes.seconds(num_reqs, np.zeros(1), context)[0]) * (factor.value if factor else 1.0)

    def verify_s(self, num_reqs: int, num_extra: np.ndarray, context: float) -> np.ndarray:
        """Time of rounds behind a draft, arguments and result as those of `PassCurve.seconds`.

        The draft itself is left out.
        """
        factor = self._verify.at(num_reqs)
        return self.passes.seconds(num_reqs, num_extra, context) * (factor.value if factor else 1.0)

    def text_s(self, num_reqs: int, num_extra: np.ndarray, context: float) -> np.ndarray:
        """Time of rounds over trees that nobody is asked for; as `verify_s`."""
        factor = self._text.at(num_reqs) or self._plain.at(num_reqs) or self._verify.at(num_reqs)
        return self.passes.seconds(num_reqs, num_extra, context) * (factor.value if factor else 1.0)

    def draft_s(self, num_reqs: int, levels: np.ndarray, context: float) -> np.ndarray:
        """Wait for trees of `levels` [n] levels for `num_reqs` sequences: float64 [n]."""
        factor = self._draft.at(num_reqs)
        return self.drafts.seconds(num_reqs, levels, context) * (factor.value if factor else 1.0)

    def doubt(self, num_reqs: int) -> float:
        """Standard error of what a draft's round takes over a plain one, as a share of it."""
        seen = (factors.at(num_reqs) for factors in (self._plain, self._verify))
        return math.hypot(*(0.0 if factor is None else factor.doubt for factor in seen))

    def by_batch(self, levels: int, num_nodes: int) -> dict[str, dict[int, float]]:
        """Seconds at a short context of a plain round, a draft and its round, by requests.

        Args:
            levels: of the draft.
            num_nodes: of each tree that is verified, its root included.
        """
        sizes = [2**power for power in range(self.drafts.num_reqs[-1].bit_length())]
        return {
            "plain": {size: self.plain_s(size, 0.0) for size in sizes},
            "draft": {size: float(self.draft_s(size, np.array([levels]), 0.0)[0]) for size in sizes},
            "verify": {size: float(self.verify_s(size, size * np.array([num_nodes - 1]), 0.0)[0]) for size in sizes},
        }

    def observe(self, took: RoundTook) -> None:
        """Correct the predictions by a round.

        Plain rounds count behind plain rounds alone, and where no draft is asked for beside them: caches and cores are
        the drafter's otherwise. Behind others than drafted rounds a draft takes their context in first, and does not
        count either.
        """
        draft = took.draft
        kind = self._verify if draft is not None else self._text if took.num_extra else self._plain
        before, self._before = self._before, kind
        self._round += 1
        if kind is self._text or (kind is before and not (kind is self._plain and took.asks)):
            ratio = took.seconds / (self._pass_s(took) + self.passes.row_s * took.num_chunk_tokens)
            kind.observe(took.num_reqs, ratio, self._round)
        if draft is not None and draft.num_reqs and kind is before:
            trees_s = self._trees_s(draft, took.mean_context) + self.drafts.row_s * draft.num_chunk_tokens
            ratio = draft.seconds / trees_s
            self._draft.observe(draft.num_reqs, ratio, self._round)

    def _pass_s(self, took: RoundTook) -> float:
        rows, (first_s, further_s) = took.num_reqs + took.num_extra, self.passes.context_s
        if rows not in self._passes_s:
            self._passes_s[rows] = float(self.passes.seconds(rows, np.array(0), 0.0))
        return self._passes_s[rows] + took.mean_context * (first_s * took.num_reqs + further_s * took.num_extra)

    def _trees_s(self, draft: DraftTook, context: float) -> float:
        key = draft.num_reqs, draft.levels
        if key not in self._drafts_s:
            short_s, longer_s = (float(self.drafts.seconds(*key, tokens)) for tokens in (0.0, 1.0))
            self._drafts_s[key] = short_s, longer_s - short_s
        short_s, token_s = self._drafts_s[key]
        return short_s + token_s * context
