"""Where a verifier and its drafter run: one placement group per pair, both bundles on one node."""

from typing import Any, NamedTuple

from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

VERIFIER_BUNDLE = 0
"""Serve puts the replica itself into the first bundle of its group."""
DRAFTER_BUNDLE = 1
STRATEGY = "STRICT_PACK"
"""The channel is memory of one node, so a pair never spans two."""


class Share(NamedTuple):
    """CPUs and GPUs of one actor, as Ray counts them; fractions share a device."""

    num_cpus: float
    num_gpus: float = 0.0

    def bundle(self) -> dict[str, float]:
        """The placement group bundle that holds this share; Ray refuses empty bundles and zero entries."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: amount for name, amount in wanted.items() if amount > 0} or {"CPU": 0.001}

    def actor_options(self) -> dict[str, float]:
        """Options that make an actor fill the bundle exactly."""
        bundle = self.bundle()
        return {"num_cpus": bundle.get("CPU", 0.0), "num_gpus": bundle.get("GPU", 0.0)}


def pair_bundles(verifier: Share, drafter: Share | None) -> list[dict[str, float]]:
    """Bundles of one replica, the verifier's first; a single one where there is no drafter."""
    return [verifier.bundle()] if drafter is None else [verifier.bundle(), drafter.bundle()]


def drafter_options(drafter: Share) -> dict[str, Any]:
    """Actor options that put a drafter beside the calling verifier.

    Raises:
        RuntimeError: the caller does not run in a placement group.
    """
    group = get_current_placement_group()
    if group is None:
        raise RuntimeError("a drafter is placed beside its verifier, but the caller has no placement group")
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=DRAFTER_BUNDLE)
    return {**drafter.actor_options(), "scheduling_strategy": strategy}
