"""Cost model of rounds: one curve for verifier passes and one for drafts, each corrected by the times of real rounds.

Curves are measured at a few points when an engine starts and interpolated linearly. A curve predicts how cost grows
with size, but lacks the work around a pass: messages, sampling, and the other process, which computes on the same
cores. This work hardly depends on the number of drafted nodes. Therefore, for each of four kinds of work (plain rounds,
rounds after a draft, rounds with trees built from earlier text, drafts), an overhead is added to the curve: the
decaying average of measured minus predicted seconds, by batch size. All times are in seconds.
"""

import math
from typing import NamedTuple

import numpy as np

FADE = 1.0 / 24
"""Fraction of their weight that earlier observations lose with each new one."""
STALE_ROUNDS = 512
"""Number of rounds after which the weight of observations has decayed to 1/e, although no new one was made."""
FORGOTTEN_ROUNDS = 4 * STALE_ROUNDS
"""Number of rounds without a new observation after which another kind's overhead is used, if there is one. A kind that
was measured as slow is thus tried again."""


class PassCurve(NamedTuple):
    """Predicted seconds of the verifier's forward passes."""

    rows: tuple[int, ...]
    """Number of rows of each measured pass, ascending."""
    short_s: tuple[float, ...]
    """Seconds of each measured pass at a short context."""
    context_s: tuple[float, float] = (0.0, 0.0)
    """Seconds that each token of a sequence's context adds. The first value is for the sequence's first row, the second
    value for each further row.
    """

    def seconds(self, num_reqs: int, num_extra: np.ndarray, context: float) -> np.ndarray:
        """Returns seconds, float64 [n], of passes over `num_reqs` roots and, in total, `num_extra` [n] drafted nodes.

        Args:
            context: tokens per sequence.
        """
        extra = np.asarray(num_extra, dtype=np.float64)
        rows, last = num_reqs + extra, len(self.rows) - 1
        short_s = np.interp(rows, self.rows, self.short_s)
        if last:  # beyond the curve, its last segment is extrapolated
            slope = (self.short_s[last] - self.short_s[last - 1]) / (self.rows[last] - self.rows[last - 1])
            short_s += max(slope, 0.0) * np.maximum(rows - self.rows[last], 0.0)
        return short_s + context * (self.context_s[0] * num_reqs + self.context_s[1] * extra)


class DraftCurve(NamedTuple):
    """Predicted seconds from the request for trees until their arrival."""

    num_reqs: tuple[int, ...]
    """Measured batch sizes, ascending: the smallest and the largest."""
    base_s: tuple[float, ...]
    """Seconds that do not depend on the number of levels, by batch size."""
    level_s: tuple[float, ...]
    """Seconds per level, by batch size."""
    context_s: float = 0.0
    """Seconds that each token of each sequence's context adds to a level."""

    def seconds(self, num_reqs: int, levels: np.ndarray | int, context: float) -> np.ndarray:
        """Returns seconds, float64 [n], of drafts with `levels` [n] levels."""
        base_s, level_s = (np.interp(num_reqs, self.num_reqs, part) for part in (self.base_s, self.level_s))
        return base_s + np.asarray(levels) * (level_s + self.context_s * num_reqs * context)


class Overhead:
    """Decaying average of measured minus predicted seconds, over about the latest 1 / `FADE` observations."""

    def __init__(self) -> None:
        self.value = 0.0
        self._weight = self._variance = 0.0
        self.seen_at = 0
        """Number of the latest observation's round."""

    def observe(self, seconds: float, predicted_s: float, now: int) -> None:
        """Adds a measurement of work for which the curve predicts `predicted_s`.

        Args:
            now: number of the round.
        """
        # The measurement has an upper limit, because a round that takes many times the usual duration was interrupted,
        # so that its duration is not its cost. The measurement has a lower limit, because a tree that arrived before
        # the host began to wait is measured as almost zero seconds, although the tree did cost time.
        most, usual_s = 2.0 if self._weight else 10.0, float(self.added_to(predicted_s))
        limited_s = min(max(seconds, usual_s / most), usual_s * most)
        # The average of such differences is never below the lowest of them, so it stays as finite as the durations are.
        error = limited_s - predicted_s - self.value
        age, self.seen_at = now - self.seen_at, now
        self._weight = (1.0 - FADE) * math.exp(-age / STALE_ROUNDS) * self._weight + 1.0
        share = 1.0 / self._weight
        self.value += share * error
        self._variance = (1.0 - share) * (self._variance + share * error**2)

    def added_to(self, predicted_s: np.ndarray | float) -> np.ndarray:
        """Returns the curve's predictions plus the overhead; at least a tenth of the predictions."""
        return np.maximum(predicted_s + self.value, predicted_s / 10)

    @property
    def doubt_s(self) -> float:
        """Standard error of the value."""
        return math.sqrt(self._variance / max(self._weight, 1.0))


class Overheads:
    """Overheads by batch size: one for each power of two."""

    def __init__(self) -> None:
        self._by_power: dict[int, Overhead] = {}

    def nearest(self, num_reqs: int) -> Overhead | None:
        """Returns the overhead of the nearest observed batch size; None before the first observation."""
        power = num_reqs.bit_length()
        nearest = min(self._by_power, key=lambda seen: abs(seen - power), default=None)
        return None if nearest is None else self._by_power[nearest]

    def observe(self, num_reqs: int, seconds: float, predicted_s: float, now: int) -> None:
        """Adds one round of `num_reqs` requests."""
        self._by_power.setdefault(num_reqs.bit_length(), Overhead()).observe(seconds, predicted_s, now)


class DraftTook(NamedTuple):
    """Measurement of a draft for which a round waited before its pass."""

    seconds: float
    num_reqs: int
    """Number of sequences that got trees; 0 if no tree arrived in time, or if the host did not read the trees."""
    levels: int
    num_chunk_tokens: int = 0
    """Number of context tokens that the drafter processed before drafting."""


class RoundTook(NamedTuple):
    """Measurement of a round."""

    seconds: float
    """Duration of the round in seconds, without the wait for trees."""
    num_reqs: int
    num_extra: int
    """Number of drafted nodes verified."""
    mean_context: float
    num_chunk_tokens: int = 0
    """Number of prompt rows in the pass."""
    draft: DraftTook | None = None
    """Draft for which the round waited; None in a round without a draft."""
    asks: bool = False
    """Whether a draft was requested during the round."""


class RoundCosts:
    """Predicts the duration of rounds without prompts.

    Prompts are left out, because prompts cost the same with and without drafts.

    A round after a draft shares cores with the drafter, publishes accepted tokens and makes a new plan. Even without
    drafted nodes, such a round takes longer than a plain round that follows plain rounds.
    """

    def __init__(self, passes: PassCurve, drafts: DraftCurve) -> None:
        self.passes, self.drafts = passes, drafts
        self._plain, self._verify, self._draft, self._text = (Overheads() for _ in range(4))
        self._passes_s: dict[int, float] = {}
        """Cache of predicted seconds of passes at a short context, by number of rows; used in every round."""
        self._drafts_s: dict[tuple[int, int], tuple[float, float]] = {}
        """Cache of predicted seconds of drafts, by numbers of requests and levels. A value holds the seconds at a short
        context, and the seconds added per token of context."""
        self._round = 0
        self._before: Overheads | None = self._verify
        """Overheads of the latest round's kind; None if the round had prompts."""

    def plain_s(self, num_reqs: int, context: float) -> float:
        """Predicts the seconds of a plain round that follows plain rounds.

        Until such a round was observed, the overhead of drafted rounds is used.
        """
        return float(self._seconds(num_reqs, np.zeros(1), context, self._plain, self._verify)[0])

    def verify_s(self, num_reqs: int, num_extra: np.ndarray, context: float) -> np.ndarray:
        """Predicts the seconds of rounds after a draft, not counting the draft.

        Arguments and result are those of `PassCurve.seconds`.
        """
        return self._seconds(num_reqs, num_extra, context, self._verify)

    def text_s(self, num_reqs: int, num_extra: np.ndarray, context: float) -> np.ndarray:
        """Predicts the seconds of rounds with trees built from earlier text and without a draft.

        Arguments and result are those of `verify_s`.
        """
        return self._seconds(num_reqs, num_extra, context, self._text, self._plain, self._verify)

    def _seconds(self, num_reqs: int, num_extra: np.ndarray, context: float, *kinds: Overheads) -> np.ndarray:
        """Predicts the seconds of rounds with the overhead of the first kind that was observed lately."""
        pass_s = self.passes.seconds(num_reqs, num_extra, context)
        overhead = None
        for kind in kinds:
            found = kind.nearest(num_reqs)
            overhead = overhead or found
            if found is not None and self._round - found.seen_at < FORGOTTEN_ROUNDS:
                overhead = found
                break
        return pass_s if overhead is None else overhead.added_to(pass_s)

    def draft_s(self, num_reqs: int, levels: np.ndarray, context: float) -> np.ndarray:
        """Predicts the seconds, float64 [n], of waiting for trees of `levels` [n] levels for `num_reqs` sequences."""
        draft_s, overhead = self.drafts.seconds(num_reqs, levels, context), self._draft.nearest(num_reqs)
        return draft_s if overhead is None else overhead.added_to(draft_s)

    def replay_s(self, num_tokens: int) -> float:
        """Predicts the seconds of computing a context again for the drafter, in passes of many rows."""
        most = self.passes.rows[-1]
        few_s, many_s = self.passes.seconds(1, np.array([most, most + num_tokens]), 0.0)
        return float(many_s - few_s)

    def doubt(self, num_reqs: int, plain_s: float, drafted_s: float) -> float:
        """Returns the relative standard error of the predicted time ratio of drafted rounds to plain rounds.

        Args:
            plain_s, drafted_s: predicted seconds of the two kinds of rounds.
        """
        kinds = (self._plain.nearest(num_reqs), plain_s), (self._verify.nearest(num_reqs), drafted_s)
        return math.hypot(*(overhead.doubt_s / seconds for overhead, seconds in kinds if overhead is not None))

    def by_batch(self, levels: int, num_nodes: int) -> dict[str, dict[int, float]]:
        """Predicts seconds of a plain round, a draft, and the draft's verification, by number of requests.

        The context is short.

        Args:
            levels: number of levels of the draft.
            num_nodes: number of nodes of each verified tree, including its root.
        """
        sizes = [2**power for power in range(self.drafts.num_reqs[-1].bit_length())]
        return {
            "plain": {size: self.plain_s(size, 0.0) for size in sizes},
            "draft": {size: float(self.draft_s(size, np.array([levels]), 0.0)[0]) for size in sizes},
            "verify": {size: float(self.verify_s(size, size * np.array([num_nodes - 1]), 0.0)[0]) for size in sizes},
        }

    def observe(self, took: RoundTook) -> None:
        """Corrects the predictions with a measured round.

        Rounds with prompts, and the rounds that follow them, are not used, because a small error in the cost of many
        prompt rows would exceed the whole overhead. A plain round is used only if the round before was plain and no
        draft was requested during the round, because otherwise the drafter's work slows the round, by using caches and
        cores. A drafted round is used only if the round before was drafted, because otherwise the drafter must first
        process context.
        """
        draft = took.draft
        kind = self._verify if draft is not None else self._text if took.num_extra else self._plain
        before, self._before = self._before, None if took.num_chunk_tokens else kind
        self._round += 1
        if took.num_chunk_tokens or before is None:
            return
        if kind is self._text or (kind is before and not (kind is self._plain and took.asks)):
            kind.observe(took.num_reqs, took.seconds, self._pass_s(took), self._round)
        if draft is not None and draft.num_reqs and kind is before and not draft.num_chunk_tokens:
            trees_s = self._trees_s(draft, took.mean_context)
            self._draft.observe(draft.num_reqs, draft.seconds, trees_s, self._round)

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
