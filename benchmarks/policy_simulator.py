"""What the speculation policy is worth on machines that are not at hand: a simulator of rounds, on a made-up clock.

    .venv/bin/python benchmarks/policy_simulator.py [--quick]

Drafted trees, whose confidences are right or wrong by as much as real heads' are, meet tables of what a machine's
rounds take. Printed are tokens per second over plain decoding's: of a fixed chain of 5, of the policy, and of an oracle
that knows each node's true acceptance and every cost. Seeded, numpy alone.
"""

import argparse

import numpy as np
from simulated_rounds import MACHINES, Machine, Took, Trees, World, widths_of

from wingbeat.runtime.speculation.acceptance import Acceptance, DraftedTrees, path_probabilities
from wingbeat.runtime.speculation.costs import CostTables, DraftTook, RoundCosts, RoundTook
from wingbeat.runtime.speculation.growth_rule import GrowthRule
from wingbeat.runtime.speculation.policy import DraftPlan, Reason, SpeculationPolicy

ACCEPTANCES = (0.6, 0.79, 0.9)
BATCHES = (1, 4, 16, 64, 256)
TABLE_BATCHES, TABLE_NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256), (0, 1, 2, 4, 7, 15, 31, 59)
"""What is measured of a real machine."""
FIXED_LEVELS = 5


class Plain:
    """Never drafts; the others build on it."""

    def plan(self, num_reqs: int) -> int:
        """See `Player`."""
        return 0

    def another_level(self, given: np.ndarray, truth: np.ndarray, chosen: np.ndarray, depth: int) -> bool:
        """See `Player`."""
        return True

    def choose(self, trees: Trees) -> tuple[np.ndarray, int]:
        """See `Player`: everything."""
        return trees.real, int(trees.real.sum())

    def learn(self, trees: Trees | None, kept: np.ndarray | None, accepted: np.ndarray | None, took: Took) -> None:
        """See `Player`."""

    def admit(self, slot: int) -> None:
        """See `Player`."""


class FixedChain(Plain):
    """A chain of `FIXED_LEVELS`: the machine is given with chains."""

    def plan(self, num_reqs: int) -> int:
        """See `Player`."""
        return FIXED_LEVELS


class Oracle(Plain):
    """Knows true acceptance and costs; drafts `levels` and gives seconds their worth at a token rate.

    The best of them over levels and rates is the oracle of a table.
    """

    def __init__(self, machine: Machine, levels: int, token_s: float) -> None:
        self.machine, self.levels, self.token_s = machine, levels, token_s
        self._path: np.ndarray | None = None

    def plan(self, num_reqs: int) -> int:
        """See `Player`."""
        return self.levels

    def another_level(self, given: np.ndarray, truth: np.ndarray, chosen: np.ndarray, depth: int) -> bool:
        """See `Player`: by the true probability that a node is reached."""
        before = np.ones((len(truth), 1)) if depth == 1 else self._path
        path = (before[:, :, None] * truth).reshape(len(truth), -1)
        self._path = np.take_along_axis(path, chosen, 1)
        machine, num_reqs = self.machine, len(truth)
        level_s = float(machine.draft_s(num_reqs, np.array(1.0)) - machine.draft_s(num_reqs, np.array(0.0)))
        node_s = np.diff(machine.verify_s(num_reqs, np.array([1.0, 2.0]) * num_reqs))[0] / num_reqs
        worth = np.maximum(self._path * truth.mean() - node_s / self.token_s, 0.0)
        return bool(worth.sum() > level_s / self.token_s)

    def choose(self, trees: Trees) -> tuple[np.ndarray, int]:
        """See `Player`."""
        path = trees.truth.copy()
        for _ in range(int(trees.depths.max()) - 1):
            path = trees.truth * np.take_along_axis(path, np.maximum(trees.parents, 0), 1)
        return best_nodes(self.machine, path, trees.real, self.token_s)


def best_nodes(machine: Machine, path: np.ndarray, real: np.ndarray, token_s: float) -> tuple[np.ndarray, int]:
    """Nodes worth their seconds at a token rate, padded where the machine pads."""
    num_reqs = len(path)
    values = np.where(real, path, -1.0)
    if machine.captured:
        widths = np.array(widths_of(machine)) - 1
        best_first = -np.sort(-np.where(real, path, 0.0), axis=1)
        gains = np.cumsum(best_first, axis=1).sum(axis=0)[np.minimum(widths, path.shape[1]) - 1]
        width = int(widths[(gains - machine.verify_s(num_reqs, num_reqs * widths) / token_s).argmax()])
        ranks = np.argsort(np.argsort(-values, axis=1, kind="stable"), axis=1)
        return real & (ranks < width), num_reqs * width
    order = np.argsort(-values, axis=None, kind="stable")[: int(real.sum())]
    gains = np.concatenate([[0.0], np.cumsum(values.ravel()[order])])
    count = int((gains - machine.verify_s(num_reqs, np.arange(len(gains))) / token_s).argmax())
    kept = np.zeros(real.size, dtype=bool)
    kept[order[:count]] = True
    return kept.reshape(real.shape), count


def measured(machine: Machine) -> CostTables:
    """What a calibration sees of a machine."""
    extra = (*(count for count in TABLE_NODES if count < machine.nodes - 1), machine.nodes - 1)
    draft_s = [machine.draft_s(batch, np.array([0.0, 1.0])).tolist() for batch in TABLE_BATCHES]
    return CostTables(
        TABLE_BATCHES,
        extra,
        tuple(tuple(machine.verify_s(batch, batch * np.array(extra, dtype=float))) for batch in TABLE_BATCHES),
        (0.0,) * len(TABLE_BATCHES),
        tuple(base for base, _ in draft_s),
        tuple(first - base for base, first in draft_s),
    )


class Adaptive(Plain):
    """The policy as an engine uses it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.acceptance = Acceptance()
        self.costs = RoundCosts(measured(machine))
        widths = widths_of(machine) if machine.captured else None
        self.policy = SpeculationPolicy(self.costs, min(machine.levels, machine.nodes - 1), machine.nodes, widths)
        self._plan = DraftPlan(0, Reason.IDLE)
        self._rule: GrowthRule | None = None
        self._num_drafted = 0

    def plan(self, num_reqs: int) -> int:
        """See `Player`."""
        self._plan = self.policy.plan(num_reqs, num_reqs, 0.0)
        if self._plan.growth is not None:
            self._rule = GrowthRule(self._plan.growth, self._table(num_reqs))
        return self._plan.levels

    def another_level(self, given: np.ndarray, truth: np.ndarray, chosen: np.ndarray, depth: int) -> bool:
        """See `Player`."""
        return self._plan.growth is None or self._rule.pays(given, chosen)

    def choose(self, trees: Trees) -> tuple[np.ndarray, int]:
        """See `Player`."""
        num_reqs = len(trees.real)
        self._drafted = DraftedTrees(np.maximum(trees.parents, 0), trees.depths, trees.log_probs, trees.real)
        self._path = path_probabilities(self._table(num_reqs), self._drafted)
        if not self.machine.captured:
            kept = self.policy.choose_nodes(self._path, trees.real, num_reqs, 0.0)
            return kept, int(kept.sum())
        ranks = np.argsort(np.argsort(-np.where(trees.real, self._path, -1.0), axis=1, kind="stable"), axis=1)
        extra = self._plan.num_nodes - 1
        return trees.real & (ranks < extra), num_reqs * extra

    def learn(self, trees: Trees | None, kept: np.ndarray | None, accepted: np.ndarray | None, took: Took) -> None:
        """See `Player`."""
        if trees is not None:
            self._num_drafted += 1
            if self._num_drafted < 64 or self._num_drafted % 8 == 0 or self._plan.reason == Reason.PROBE_DRAFT:
                self.policy.observe(self._path, self._drafted, self._plan.levels)
                on_path = accepted.copy()
                on_path[:, 0] = True
                tried = kept & np.take_along_axis(on_path, self._drafted.parents, axis=1)
                self.acceptance.record(self._drafted, np.zeros(len(kept), dtype=np.int64), tried, accepted)
        if not self.machine.captured:
            draft = DraftTook(took.draft_s, took.num_reqs, took.levels) if took.levels else None
            self.costs.observe(RoundTook(took.verify_s, took.num_reqs, took.extra, 0.0, draft=draft))

    def _table(self, num_reqs: int) -> np.ndarray:
        return np.repeat(self.acceptance.table[:1], num_reqs, axis=0)


def oracle(machine: Machine, num_reqs: int, acceptance: float, miscalibrated: bool, plain: float) -> float:
    """The best of what an `Oracle` gets, over levels and what a token is worth."""
    best = plain
    for levels in range(1, machine.levels + 1) if machine.captured else (machine.levels,):
        for _ in range(2):
            world = World(machine, num_reqs, acceptance, miscalibrated)
            best = max(best, world.tokens_per_s(Oracle(machine, levels, 1 / best), max(120 // num_reqs, 12), 2))
    return best


def main() -> None:
    """Print a table by machine, and what the policy comes to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one acceptance, small batches")
    parser.add_argument("--machines", type=int, nargs="+", default=list(range(len(MACHINES))), help="by number")
    args = parser.parse_args()
    batches, acceptances = ((1, 16), (0.79,)) if args.quick else (BATCHES, ACCEPTANCES)
    for machine in (MACHINES[number] for number in args.machines):
        chain = machine._replace(levels=FIXED_LEVELS, top_k=1, nodes=FIXED_LEVELS + 1)
        print(f"{machine.name}\n{'confidence':>14} acceptance  batch  plain  chain  policy  oracle  policy / better")
        against: list[float] = []
        for miscalibrated in (False, True):
            for acceptance in acceptances:
                for batch in batches:
                    case = (batch, acceptance, miscalibrated)
                    plain = batch / float(machine.verify_s(batch, np.array(0.0)))
                    rounds = int(np.clip(500 // batch, 20, 300))
                    fixed = World(chain, *case).tokens_per_s(FixedChain(), rounds, 2) / plain
                    policy = World(machine, *case).tokens_per_s(Adaptive(machine), rounds, 80) / plain
                    best = max(oracle(machine, *case, plain) / plain, policy)
                    against.append(policy / max(fixed, 1.0))
                    name = "miscalibrated" if miscalibrated else "calibrated"
                    row = f"{name:>14} {acceptance:10.2f} {batch:6} {1.0:6.2f} {fixed:6.2f} {policy:7.2f} {best:7.2f}"
                    print(f"{row} {against[-1]:16.2f}", flush=True)
        print(f"{'mean':>14} {np.exp(np.log(against).mean()):67.2f}\n{'least':>14} {min(against):67.2f}\n", flush=True)


if __name__ == "__main__":
    main()
