"""Checks before deployment that the nodes of a Ray cluster have enough resources for an application."""

from wingbeat.cluster.placement import pair_bundles
from wingbeat.deployments.app_config import CPUS_OF_ROUTER, AppConfig
from wingbeat.deployments.start_checks.room import Group, check_node_gpus, check_room, node_gpus, node_resources


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
