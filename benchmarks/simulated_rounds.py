"""Machines, drafts and rounds on a made-up clock: what `policy_simulator.py` plays in. Seeded, numpy alone."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

WIDTHS = (4, 16)
"""Of captured trees, beside the widest."""
REQUEST_TOKENS = 200
SPREAD = 1.3
"""Concentration of the beta distribution that top-1 acceptance is drawn from: drafters are sure, or they are not."""
TAIL = 0.8
"""P(the true token ranks below 1 + n | the first candidate is wrong) = (1 + n) ** -TAIL."""


class Machine(NamedTuple):
    """Seconds of a round's parts."""

    name: str
    verify_s: Callable[[float, np.ndarray], np.ndarray]
    """(sequences, drafted nodes of all of them)"""
    draft_s: Callable[[float, np.ndarray], np.ndarray]
    """(sequences, levels)"""
    levels: int
    top_k: int
    nodes: int
    """Of the largest tree, its root included."""
    captured: bool
    """Every tree of a round is padded to one of `WIDTHS`, and all is decided before the trees are there."""
    tables_off: float = 1.0
    """Real seconds of tree rounds over the measured ones that a policy is given."""


def _dense_h100(num_reqs: float, extra: np.ndarray) -> np.ndarray:
    rows, wide = num_reqs + extra, 1 - np.exp(-extra / max(num_reqs, 1) / 25)
    return 1e-3 * (0.7 + (6.8**4 + (0.027 * rows) ** 4) ** 0.25 + 0.006 * rows + 0.03 * num_reqs + 1.5 * wide)


def _moe_h100(num_reqs: float, extra: np.ndarray) -> np.ndarray:
    rows = num_reqs + extra
    return 1e-3 * (2.0 + 14.0 * (1 - (1 - 8 / 128) ** rows) + 0.009 * rows + 0.03 * num_reqs)


def _cpu(num_reqs: float, extra: np.ndarray) -> np.ndarray:
    return 1e-3 * (7.0 + 0.95 * num_reqs + 0.75 * extra)


def _gpu_draft(num_reqs: float, levels: np.ndarray) -> np.ndarray:
    return 1e-3 * (0.4 + (0.3 + 0.002 * num_reqs) * levels)


def _cpu_draft(num_reqs: float, levels: np.ndarray) -> np.ndarray:
    return 1e-3 * (0.6 + 0.1 * num_reqs + (0.6 + 0.06 * num_reqs) * levels)


MACHINES = (
    Machine("H100, dense 8B", _dense_h100, _gpu_draft, 5, 4, 16, captured=True),
    Machine("H100, dense 8B, wide trees", _dense_h100, _gpu_draft, 7, 4, 60, captured=True),
    Machine("H100, mixture of experts", _moe_h100, _gpu_draft, 5, 4, 16, captured=True),
    Machine("CPU, chains", _cpu, _cpu_draft, 7, 1, 16, captured=False),
    Machine("CPU, chains, tables 1.4 off", _cpu, _cpu_draft, 7, 1, 16, captured=False, tables_off=1.4),
)


class Trees(NamedTuple):
    """Drafted trees: [num_reqs, nodes], column 0 the roots."""

    parents: np.ndarray
    depths: np.ndarray
    log_probs: np.ndarray
    """Confidence given the parent, as the drafter says it."""
    real: np.ndarray
    truth: np.ndarray
    """P(accepted | parent accepted)."""
    right: np.ndarray
    """Whether it is the target's token, if its parent was."""


class Player(Protocol):
    """Decides the rounds of one engine."""

    def plan(self, num_reqs: int) -> int:
        """Levels of the next draft, at most; 0 for a plain round."""
        ...

    def another_level(self, given: np.ndarray, truth: np.ndarray, chosen: np.ndarray, depth: int) -> bool:
        """Whether to grow on below `depth`; asked where nothing is captured.

        Args:
            given: log-probabilities of the candidates at `depth` [num_reqs, frontier, top_k].
            truth: likewise, their true acceptance.
            chosen: which of a request's candidates are expanded next [num_reqs, kept].
        """
        ...

    def choose(self, trees: Trees) -> tuple[np.ndarray, int]:
        """Nodes to verify, bool [num_reqs, nodes], and the rows beside the roots that they take."""
        ...

    def learn(self, trees: Trees | None, kept: np.ndarray | None, accepted: np.ndarray | None, took: "Took") -> None:
        """Take in a round; no trees where it was plain."""
        ...

    def admit(self, slot: int) -> None:
        """Another request has this slot."""
        ...


class Took(NamedTuple):
    """Seconds of a round."""

    num_reqs: int
    draft_s: float
    verify_s: float
    levels: int
    extra: int


class World:
    """Sequences of one machine: grows their trees and lets a player play."""

    def __init__(self, machine: Machine, num_reqs: int, acceptance: float, miscalibrated: bool, seed: int = 7) -> None:
        self.machine, self.num_reqs, self.acceptance = machine, num_reqs, acceptance
        self.miscalibrated = miscalibrated
        self.rng = np.random.default_rng(seed)
        self.easiness = np.array([self._easiness() for _ in range(num_reqs)])
        self.left = self.rng.integers(1, REQUEST_TOKENS, num_reqs)

    def _easiness(self) -> float:
        """What a drafter does not know of a request: log-odds of acceptance."""
        return self.rng.normal(0.0, 0.7) if self.miscalibrated else 0.0

    def tokens_per_s(self, player: Player, rounds: int, warm_up: int) -> float:
        """Over `rounds` rounds after `warm_up` others."""
        tokens, seconds = 0, 0.0
        for number in range(warm_up + rounds):
            emitted, took_s = self._round(player)
            if number >= warm_up:
                tokens, seconds = tokens + emitted, seconds + took_s
        return tokens / seconds

    def _round(self, player: Player) -> tuple[int, float]:
        machine, num_reqs = self.machine, self.num_reqs
        levels, trees, kept, accepted = player.plan(num_reqs), None, None, None
        draft_s, extra, grown, emitted = 0.0, 0, 0, np.ones(num_reqs, dtype=np.int64)
        if levels:
            trees, grown = self._grow(player, levels)
            draft_s = float(machine.draft_s(num_reqs, np.array(grown))) * self._noise()
            kept, extra = player.choose(trees)
            accepted = self._accepted(trees, kept)
            emitted += accepted.sum(axis=1)
        off = machine.tables_off if levels else 1.0
        verify_s = float(machine.verify_s(num_reqs, np.array(extra))) * off * self._noise()
        player.learn(trees, kept, accepted, Took(num_reqs, draft_s, verify_s, grown, extra))
        self.left -= emitted
        for slot in np.flatnonzero(self.left <= 0).tolist():
            self.left[slot], self.easiness[slot] = REQUEST_TOKENS, self._easiness()
            player.admit(slot)
        return int(emitted.sum()), draft_s + verify_s

    def _noise(self) -> float:
        return float(np.exp(self.rng.normal(0.0, 0.05)))

    def _grow(self, player: Player, most_levels: int) -> tuple[Trees, int]:
        """EAGLE-2: each level expands the best candidates of the one before; the best nodes of all stay."""
        machine, count, k = self.machine, self.num_reqs, self.machine.top_k
        ranks = np.arange(1, k)
        tail = ranks**-TAIL - (ranks + 1.0) ** -TAIL
        score, node = np.zeros((count, 1)), np.zeros((count, 1), dtype=np.int64)
        columns: list[list[np.ndarray]] = [[] for _ in Trees._fields]
        scores, first = [], 1
        for depth in range(1, min(most_levels, machine.levels) + 1):
            width = score.shape[1]
            mean = self.acceptance - 0.005 * (depth - 1)
            sure = self.rng.beta(mean * SPREAD, (1 - mean) * SPREAD, (count, width)).clip(0.003, 0.997)
            true_first = _sigmoid(_logit(sure) + self.easiness[:, None])
            given, truth = (
                np.concatenate([top[..., None], (1 - top)[..., None] * tail], axis=2) for top in (sure, true_first)
            )
            if self.miscalibrated:
                given = _sigmoid(0.6 * _logit(given) - 1.0)
            drawn = self.rng.random((count, width, 1))
            rank = (drawn > truth.cumsum(axis=2)).sum(axis=2)
            right = np.arange(k) == rank[..., None]
            total = score[..., None] + np.log(given)
            flat = total.reshape(count, -1)
            parents = np.repeat(node, k, axis=1)
            for column, values in zip(
                columns, (parents, np.full_like(parents, depth), np.log(given), right | True, truth, right), strict=True
            ):
                column.append(values.reshape(count, -1))
            scores.append(flat)
            chosen = np.argsort(-flat, axis=1, kind="stable")[:, : min(k, flat.shape[1])]
            score, node = np.take_along_axis(flat, chosen, 1), first + chosen
            first += flat.shape[1]
            if (
                depth < most_levels
                and not machine.captured
                and not player.another_level(np.log(given), truth, chosen, depth)
            ):
                break
        return self._best(columns, np.concatenate(scores, axis=1)), depth

    def _best(self, columns: list[list[np.ndarray]], scores: np.ndarray) -> Trees:
        keep = min(self.machine.nodes - 1, scores.shape[1])
        order = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :keep], axis=1)
        number = np.zeros((len(scores), scores.shape[1] + 1), dtype=np.int64)
        np.put_along_axis(number, order + 1, np.arange(1, keep + 1)[None], axis=1)
        parents, *others = (np.take_along_axis(np.concatenate(column, axis=1), order, 1) for column in columns)
        parents = np.take_along_axis(number, parents, axis=1)
        fills = (-1, 0, 0.0, False, 1.0, True)
        return Trees(
            *(
                np.concatenate([np.full((len(scores), 1), fill), values], axis=1)
                for fill, values in zip(fills, (parents, *others), strict=True)
            )
        )

    def _accepted(self, trees: Trees, kept: np.ndarray) -> np.ndarray:
        reached = np.zeros(kept.shape, dtype=bool)
        reached[:, 0] = True
        up = np.maximum(trees.parents, 0)
        for _ in range(int(trees.depths.max())):
            reached[:, 1:] = (np.take_along_axis(reached, up, 1) & kept & trees.right)[:, 1:]
        return reached & kept


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _logit(p: np.ndarray) -> np.ndarray:
    return np.log(p / (1 - p))


def widths_of(machine: Machine) -> tuple[int, ...]:
    """Nodes of a tree in each captured shape."""
    return (*(width for width in WIDTHS if width < machine.nodes), machine.nodes)
