"""Checks before deployment whether the nodes of a Ray cluster have room for an application's groups of actors; Ray
itself would wait to place them for ever.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from wingbeat.cluster.placement import ROUNDING, Share, pair_bundles
from wingbeat.deployments.app_config import CPUS_OF_ROUTER, AppConfig


def gpus_of_pair(verifier: Share, drafter: Share | None, num_ranks: int = 1) -> int:
    """Number of GPUs that one node must have for a pair. Fractions share a GPU if their sum is at most 1."""
    shares = [verifier.num_gpus] * num_ranks + ([drafter.num_gpus] if drafter is not None else [])
    whole = sum(int(share) for share in shares if share >= 1)
    fractions = [share for share in shares if 0 < share < 1]
    return whole + (1 if 0 < sum(fractions) <= 1 + ROUNDING else len(fractions))


def check_node_gpus(
    verifier: Share, drafter: Share | None, node_gpus: Iterable[float], one_node: bool = True, num_ranks: int = 1
) -> None:
    """Refuse a pair that fits on no node; without this check Ray would wait for such a node for ever.

    Args:
        verifier: share of each rank of the verifier.
        node_gpus: GPUs of each live node.
        one_node: whether verifier and drafter must run on the same node.

    Raises:
        ValueError: names both shares and the largest node.
    """
    largest = max(node_gpus, default=0.0)
    if not one_node and drafter is not None:
        for name, share in (("num_gpus_per_verifier", verifier), ("num_gpus_per_drafter", drafter)):
            if share.num_gpus > largest + ROUNDING:
                raise ValueError(f"{name} is {share.num_gpus:g}: Ray sees {largest:g} GPUs on the largest node")
        return
    needed = gpus_of_pair(verifier, drafter, num_ranks)
    if needed > largest + ROUNDING:
        shares = f"num_gpus_per_verifier is {verifier.num_gpus:g}"
        shares += f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
        if drafter is not None:
            shares += f" and num_gpus_per_drafter is {drafter.num_gpus:g}"
        raise ValueError(f"{shares}: a pair needs {needed} GPU(s) of one node, Ray sees {largest:g} on the largest")


class Group(NamedTuple):
    """Actors that are placed together, and the number of such groups that must be placed."""

    name: str
    """Name of one group, for messages."""
    bundles: Sequence[Mapping[str, float]]
    num: int = 1
    one_node: bool = True
    """Whether all bundles of a group must lie on one node."""


def check_room(groups: Sequence[Group], nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse groups for which the cluster is too small; without this check Ray would wait for resources for ever.

    Args:
        nodes: total resources of each live node, including those in use.

    Raises:
        ValueError: a group fits on no node, or all groups together exceed the cluster; names the group, the resource
            and its available amount.
    """
    wanted: Counter[str] = Counter()
    for group in groups:
        whole = Counter[str]()
        for bundle in group.bundles:
            whole.update(bundle)
        for parts in [whole] if group.one_node else map(Counter, group.bundles):
            if not any(_holds(node, parts) for node in nodes):
                name, amount = _scarcest(parts, nodes)
                most = max((node.get(name, 0.0) for node in nodes), default=0.0)
                raise ValueError(f"{group.name} takes {amount:g} {name} of one node: Ray sees {most:g} on the largest")
        for name, amount in whole.items():
            wanted[name] += amount * group.num
    there: Counter[str] = Counter()
    for node in nodes:
        there.update(node)
    if not _holds(there, wanted):
        name, amount = _scarcest(wanted, [there])
        takers = ", ".join(f"{group.num} x {group.name}" for group in groups if any(name in b for b in group.bundles))
        raise ValueError(f"{takers}: together they take {amount:g} {name}, Ray sees {there[name]:g} in all nodes")


def _holds(node: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return all(amount <= node.get(name, 0.0) + ROUNDING for name, amount in wanted.items())


def _scarcest(wanted: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> tuple[str, float]:
    """The resource of which the largest share is missing, and the wanted amount of that resource."""
    most = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in wanted}
    name = max(wanted, key=lambda name: (wanted[name] - most[name]) / wanted[name])
    return name, wanted[name]


def node_gpus() -> list[float]:
    """GPUs of each live node of the Ray cluster that this process is connected to."""
    import ray

    return [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]


def node_resources() -> list[dict[str, float]]:
    """Total resources of each live node of the Ray cluster that this process is connected to."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def check_in_cluster(config: AppConfig) -> None:
    """Raises ValueError if the current nodes cannot hold the application, because Ray would wait for resources without
    end.

    The message names the resource, the deployments that need it, the available amount, and the settings to change.
    """
    served = config.served()
    for one in served:
        if one.resolved_device() != "cuda":
            continue
        drafter = one.drafter_share() if one.has_own_drafter() else None
        one_node, ranks = not one.may_span_nodes(), one.num_ranks()
        check_node_gpus(one.verifier_share(), drafter, node_gpus(), one_node=one_node, num_ranks=ranks)
    routers = max(config.num_router_replicas, (config.router_autoscaling_config or {}).get("min_replicas", 1))
    groups = [Group("a router", [{"CPU": CPUS_OF_ROUTER}], routers)]
    for one in served:
        groups += _groups(one)
    try:
        check_room(groups, node_resources())
    except ValueError as error:
        raise ValueError(
            f"{error}; lower num_replicas or num_cpus_per_verifier, change drafter_resources, or give Ray more (of its "
            "own CPUs: `ray start --head --num-cpus N`)"
        ) from None


def _groups(config: AppConfig) -> list[Group]:
    """Returns the placement groups of a model: one per verifier with its drafter, and one per shared drafter."""
    own = config.drafter_share() if config.has_own_drafter() else None
    whose = "a verifier" if own is None else "a verifier with its drafter"
    bundles = pair_bundles(config.verifier_share(), own, config.num_ranks())
    groups = [Group(whose, bundles, config.min_pairs(), not config.may_span_nodes())]
    if shared := config.num_shared_drafters():
        groups.append(Group("a shared drafter", [config.drafter_share().bundle()], shared))
    return groups
