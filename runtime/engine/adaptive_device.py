"""Adaptive speculation where the host runs behind the device: it forecasts a width, the device picks the nodes.

What `AdaptiveSpeculation` sees of each round's trees before it is launched, this learns with the round's tokens.
"""

import numpy as np

from wingbeat.runtime.engine.adaptive import AdaptiveSpeculation, launched_with, learns_from, mean_context
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.speculation.acceptance import path_probabilities
from wingbeat.runtime.speculation.policy import DraftPlan, Round, SpeculationPolicy
from wingbeat.runtime.verifier.pruning import DevicePruner, unpack_evidence
from wingbeat.runtime.verifier.round import RoundInFlight, RoundResult

_UPLOAD_EVERY = 4
"""Rounds learned from between two uploads of the tables, which change slowly."""


class DeviceAdaptiveSpeculation(AdaptiveSpeculation):
    """`AdaptiveSpeculation` without a look at the trees of a round in flight.

    Args:
        pruner: of the model runner.
        widths: nodes per tree, the root included, that can be verified; ascending.
    """

    def __init__(self, policy: SpeculationPolicy, pruner: DevicePruner, widths: tuple[int, ...]) -> None:
        super().__init__(policy)
        self._pruner = pruner
        self._widths = widths
        self.num_nodes = widths[-1]

    def prune(self, trees: TokenTree | None, decodes: list[Sequence]) -> TokenTree | None:
        """Note the round; its trees go to the device as they are."""
        self._pruned = launched_with(decodes)
        return trees

    def plan(self, running: list[Sequence], proposals: list[Sequence]) -> DraftPlan:
        """As the policy says; also how many nodes of each tree the next round verifies."""
        plan = super().plan(running, proposals)
        if plan.levels:
            num_reqs, context = max(len(running), len(proposals)), mean_context(proposals or running)
            self.num_nodes = self.policy.choose_width(num_reqs, len(proposals), context, self._widths)
        return plan

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Learn what the round accepted; the trees come with the result.

        What it took is not learned: the host's times are those of enqueueing, so the measured tables stand as they are.
        """
        this = self._launched.popleft()
        if result.evidence is None:
            return
        self._round += 1
        if not learns_from(self._round, this.num_decodes):
            return
        seen = unpack_evidence(result.evidence)
        depths = np.minimum(seen.depths, self.policy.max_depth)
        kinds, slots = this.kinds_and_slots()
        conditional = self.policy.conditional(seen.log_probs, depths, kinds, slots)
        path = path_probabilities(conditional, seen.parents, int(depths.max()))
        rows = np.array(flight.live[: this.num_decodes]) & seen.real.any(axis=1)
        if not rows.any():
            return
        self.policy.observe_trees(path[rows], seen.kept[rows], depths[rows], seen.real[rows])
        self.policy.observe_ranks(path[rows], seen.real[rows])
        on_path = _before_pruning(result.path_nodes, seen.kept)
        tried = seen.kept & np.take_along_axis(on_path, seen.parents, axis=1)
        parts = (seen.log_probs, depths, kinds, slots, tried, tried & on_path)
        self.policy.learn(Round(*(part[rows] for part in parts)))
        if self._round % _UPLOAD_EVERY == 0:
            self._pruner.upload(self.policy.tracker)


def _before_pruning(path_nodes: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Nodes on the accepted path, bool [num_reqs, num_nodes], from their numbers in the pruned tree."""
    stays = kept.copy()
    stays[:, 0] = True
    on_path = np.zeros(kept.shape, dtype=bool)
    np.put_along_axis(on_path, path_nodes, True, axis=1)
    return stays & np.take_along_axis(on_path, np.cumsum(stays, axis=1) - 1, axis=1)
