"""What a round takes: measured tables, interpolated, and scaled by what rounds really take. Seconds throughout."""

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

SecondsT = TypeVar("SecondsT", float, np.ndarray)

_SMOOTHING = 0.05
"""Least weight of one round in a scale."""
PLAIN_BEFORE = 2
"""Plain rounds behind a draft that do not show what plain rounds take: caches and cores are the drafter's. Behind more
of them the first draft is none to judge drafts by, either."""
_LEAST, _MOST = 0.1, 10.0
_STALE_AFTER = 24
"""Rounds without a draft, or without a pass of such a size, after which one says as much as all before together."""


@dataclass(frozen=True)
class CostTables:
    """Measured medians, over batch sizes in ascending order.

    Raises:
        ValueError: a table does not have the shape of its axes.
    """

    batch_sizes: tuple[int, ...]
    extra_nodes: tuple[int, ...]
    """Drafted nodes per sequence, ascending, 0 first."""
    verify_s: tuple[tuple[float, ...], ...]
    """[batch size][extra nodes], at a short context."""
    context_s: tuple[float, ...]
    """[batch size]: added by each token of context of each sequence."""
    draft_base_s: tuple[float, ...]
    """[batch size]: of a draft, beside its levels."""
    draft_level_s: tuple[float, ...]
    """[batch size]: of each level."""

    def __post_init__(self) -> None:
        rows = (self.verify_s, self.context_s, self.draft_base_s, self.draft_level_s)
        if any(len(row) != len(self.batch_sizes) for row in rows):
            raise ValueError("cost tables need one row per batch size")
        if any(len(row) != len(self.extra_nodes) for row in self.verify_s):
            raise ValueError("verify_s needs one column per entry of extra_nodes")


class Scale:
    """Real seconds over a table's, by a running mean."""

    def __init__(self) -> None:
        self.value = 1.0
        self.num_seen = 0

    def observe(self, seconds: float, of_s: float, beside_s: float = 0.0) -> None:
        """Note what was really taken.

        Args:
            of_s: by the tables, of what this scales.
            beside_s: likewise, of what shared the time.
        """
        self.num_seen += 1
        weight = max(1.0 / self.num_seen, _SMOOTHING) * of_s / (of_s + beside_s)
        now = seconds / (of_s + beside_s)
        if self.num_seen > 1:  # one round of many times the usual length is an interruption, not a cost
            now = min(now, 2.0 * self.value)
        self.value = min(max(self.value + weight * (now - self.value), _LEAST), _MOST)


def power_of(rows: int) -> int:
    """The power of two that so many rows of a pass, at least 1, are nearest to."""
    return round(math.log2(rows))


def between_powers(by_power: dict[int, float], rows: np.ndarray) -> np.ndarray:
    """Factors of passes of so many rows, at least 1, from those of powers of two: float64 like `rows`.

    Between powers the factor is interpolated; beyond those known it is the nearest one's, and 1 where none is.
    """
    if not by_power:
        return np.ones(rows.shape)
    powers = sorted(by_power)
    return np.interp(np.log2(rows), powers, [by_power[power] for power in powers])


class ScaleByRows:
    """Real seconds over a table's, by the rows of a pass: one running mean for each power of two.

    A table measured while other work ran is wrong by another factor for each shape, and what a round takes beside its
    pass weighs more the fewer rows it has.
    """

    def __init__(self) -> None:
        self._by_power: dict[int, Scale] = {}
        self._seen_at: dict[int, int] = {}
        self._num_rounds = 0

    @property
    def knows(self) -> bool:
        """Whether any pass was seen."""
        return bool(self._by_power)

    def tick(self) -> None:
        """A round has passed, of any shape."""
        self._num_rounds += 1

    def of(self, rows: np.ndarray) -> np.ndarray:
        """As `between_powers`."""
        return between_powers({power: scale.value for power, scale in self._by_power.items()}, rows)

    def observe(self, seconds: float, of_s: float, beside_s: float, rows: int) -> None:
        """Note what a pass of so many rows really took; arguments as those of `Scale.observe`."""
        power = power_of(rows)
        scale = self._by_power.get(power)
        if scale is None:
            scale = self._by_power[power] = Scale()
        if self._num_rounds - self._seen_at.get(power, self._num_rounds) > _STALE_AFTER:
            scale.num_seen = 1  # all that is known counts as much as the next one
        scale.observe(seconds, of_s, beside_s)
        self._seen_at[power] = self._num_rounds


class ScaleAndOffset:
    """Real seconds as a multiple of a table's, and what comes beside it whatever the table says.

        seconds = scale * of_s + offset_s

    The way to a drafter takes as long for any tree. What seconds were mispredicted by goes to both, the more to the
    scale the longer the table's were beside their mean (normalised least mean squares): so trees of several depths tell
    the two apart.
    """

    def __init__(self) -> None:
        self.scale, self.offset_s = 1.0, 0.0
        self.num_seen = 0
        self._mean_s = 0.0
        """By the table."""

    def predict(self, of_s: SecondsT) -> SecondsT:
        """Of what takes so long by the table."""
        return self.scale * of_s + self.offset_s

    def observe(self, seconds: float, of_s: float, beside_s: float) -> None:
        """Note what was really taken; arguments as those of `Scale.observe`."""
        self.num_seen += 1
        weight = max(1.0 / self.num_seen, _SMOOTHING) * of_s / (of_s + beside_s)
        expected = self.predict(of_s + beside_s)
        least, most = (_LEAST, _MOST) if self.num_seen == 1 else (0.5, 2.0)
        seconds = min(max(seconds, least * expected), most * expected)
        all_s, error = of_s + beside_s, weight * (seconds - expected)
        self._mean_s += max(1.0 / self.num_seen, _SMOOTHING) * (all_s - self._mean_s)
        to_scale = error * all_s / (all_s**2 + self._mean_s**2)
        scale = min(max(self.scale + to_scale, _LEAST), _MOST)
        self.offset_s = max(self.offset_s + error - (scale - self.scale) * all_s, 0.0)
        self.scale = scale


class DraftTook(NamedTuple):
    """What a round had waited for before it ran."""

    seconds: float
    num_reqs: int
    """That trees came for; 0 where none came in time or the host has not seen them."""
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
    that one without a node takes longer than a plain round among plain rounds. Plain rounds, those behind drafts and
    drafts are corrected each by itself.
    """

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        self._plain, self._verify, self._draft = ScaleByRows(), ScaleByRows(), ScaleAndOffset()
        self._num_plain = 0
        """Plain rounds since the latest one with a draft."""
        self._num_unseen = 0
        """Rounds since a draft was last seen."""
        self._by_batch: dict[int, _BatchCosts] = {}
        """Asked for in every round."""
        most, level = tables.batch_sizes[-1], tables.draft_level_s
        # What a token of a prompt takes: about what a row of the largest batch does.
        rows = max((tables.extra_nodes[-1] - tables.extra_nodes[0]) * most, 1)
        self._verify_row_s = max(tables.verify_s[-1][-1] - tables.verify_s[-1][0], 0.0) / rows
        self._draft_row_s = max(level[-1] - level[0], 0.0) / max(most - tables.batch_sizes[0], 1)

    def plain_s(self, num_reqs: int, mean_context: float) -> float:
        """Time of a plain round behind plain rounds; as one behind a draft takes, until one was seen."""
        rows = np.array([num_reqs])
        scale = (self._plain if self._plain.knows else self._verify).of(rows)
        return float((self.pass_s(num_reqs, np.zeros(1), mean_context) * scale)[0])

    def verify_s(self, num_reqs: int, num_extra: np.ndarray, mean_context: float) -> np.ndarray:
        """Time of rounds behind a draft, over `num_reqs` roots and `num_extra` [n] drafted nodes in all: float64 [n].

        The draft itself is left out.
        """
        scale = self._verify.of(num_reqs + np.asarray(num_extra))
        return self.pass_s(num_reqs, num_extra, mean_context) * scale

    def draft_s(self, num_reqs: int, levels: np.ndarray) -> np.ndarray:
        """Wait for trees of `levels` [n] levels for `num_reqs` sequences: float64 [n]."""
        return self._draft.predict(self._trees_s(num_reqs, levels))

    def by_batch(self, levels: int, num_nodes: int) -> dict[str, dict[int, float]]:
        """Seconds at the batch sizes that were measured, at a short context: a plain round, a draft, its round.

        Args:
            levels: of the draft.
            num_nodes: of each tree that is verified, its root included.
        """
        sizes = self.tables.batch_sizes
        return {
            "plain": {size: self.plain_s(size, 0.0) for size in sizes},
            "draft": {size: float(self.draft_s(size, np.array([levels]))[0]) for size in sizes},
            "verify": {size: float(self.verify_s(size, size * np.array([num_nodes - 1]), 0.0)[0]) for size in sizes},
        }

    def observe(self, took: RoundTook) -> None:
        """Correct the predictions by a round, unless it shows neither what plain rounds nor what drafts take.

        Plain rounds count behind plain rounds alone, and where no draft is asked for beside them; a draft does not
        count where it is the first one behind plain rounds.
        """
        num_before, self._num_plain = self._num_plain, 0 if took.draft else self._num_plain + 1
        self._num_unseen += 1
        self._plain.tick()
        self._verify.tick()
        if took.draft is None:
            if took.num_extra or (num_before >= PLAIN_BEFORE and not took.asks):
                self._observe_pass(self._verify if took.num_extra else self._plain, took)
        elif num_before <= PLAIN_BEFORE:
            self._observe_pass(self._verify, took)
            if took.draft.num_reqs:
                self._observe_draft(took.draft)

    def _observe_pass(self, scales: ScaleByRows, took: RoundTook) -> None:
        pass_s = self.one_pass_s(took.num_reqs, took.num_extra, took.mean_context)
        beside_s = self._verify_row_s * took.num_chunk_tokens
        scales.observe(took.seconds, pass_s, beside_s, took.num_reqs + took.num_extra)

    def _observe_draft(self, draft: DraftTook) -> None:
        trees_s = self._trees_s(draft.num_reqs, draft.levels)
        if self._num_unseen > _STALE_AFTER:
            # All that is known counts as much as the next one, and each after that as much as what was seen anew:
            # one quick answer among plain rounds must not be believed for longer than the next ones are slow.
            self._draft.num_seen = min(self._draft.num_seen, 1)
        self._num_unseen = 0
        self._draft.observe(draft.seconds, trees_s, self._draft_row_s * draft.num_chunk_tokens)

    def pass_s(self, num_reqs: int, num_extra: np.ndarray, mean_context: float) -> np.ndarray:
        """Time of the verifier's passes alone, by the tables: arguments and result as those of `verify_s`."""
        batch, extra = self._of_batch(num_reqs), np.asarray(num_extra)
        nodes_s = np.interp(extra, batch.nodes, batch.verify_s)
        return nodes_s + batch.beyond_s * np.maximum(extra - batch.nodes[-1], 0.0) + batch.context_s * mean_context

    def one_pass_s(self, num_reqs: int, num_extra: int, mean_context: float) -> float:
        """`pass_s` of one pass, as every round asks it."""
        batch = self._of_batch(num_reqs)
        if num_extra not in batch.known_s:
            batch.known_s[num_extra] = float(self.pass_s(num_reqs, np.array(num_extra), 0.0))
        return batch.known_s[num_extra] + batch.context_s * mean_context

    def _trees_s(self, num_reqs: int, levels: SecondsT) -> SecondsT:
        batch = self._of_batch(num_reqs)
        return batch.draft_base_s + batch.draft_level_s * levels

    def _of_batch(self, num_reqs: int) -> "_BatchCosts":
        if num_reqs not in self._by_batch:
            self._by_batch[num_reqs] = self._interpolated(num_reqs)
        return self._by_batch[num_reqs]

    def _interpolated(self, num_reqs: int) -> "_BatchCosts":
        tables = self.tables

        def at(by_batch: tuple[float, ...]) -> float:
            return float(np.interp(num_reqs, tables.batch_sizes, by_batch))

        verify_s = np.array([at(column) for column in zip(*tables.verify_s, strict=True)])
        nodes = np.array(tables.extra_nodes, dtype=np.float64) * max(num_reqs, 1)
        slope = (verify_s[-1] - verify_s[-2]) / (nodes[-1] - nodes[-2]) if len(nodes) > 1 else 0.0
        return _BatchCosts(
            nodes=nodes,
            verify_s=verify_s,
            beyond_s=max(slope, 0.0),
            context_s=at(tables.context_s),
            draft_base_s=at(tables.draft_base_s),
            draft_level_s=at(tables.draft_level_s),
            known_s={},
        )


class _BatchCosts(NamedTuple):
    """The tables at one batch size."""

    nodes: np.ndarray
    """float64 [n] ascending: drafted nodes of all sequences together."""
    verify_s: np.ndarray
    """float64 [n]: of passes with so many."""
    beyond_s: float
    """Added by each node above the last of `nodes`."""
    context_s: float
    """Added by each token of context of each sequence."""
    draft_base_s: float
    draft_level_s: float
    known_s: dict[int, float]
    """Of passes that were asked for one by one, by their drafted nodes, without context."""
