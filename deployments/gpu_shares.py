"""What an application takes of the GPUs there are, where its settings leave that open; knows them by numbers alone."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from wingbeat.cluster.gpus import Gpu, gpus_here, gpus_of_cluster
from wingbeat.cluster.placement import Group, check_node_gpus, check_room, node_gpus, node_resources, pair_bundles
from wingbeat.deployments.app_config import CPUS_OF_ROUTER, AppConfig
from wingbeat.deployments.options.problems import SettingsError, first_problem

WITH_DRAFTER, BESIDE = 0.7, 0.3
"""Of one GPU that a verifier shares with its drafter."""


class Placed(NamedTuple):
    """Settings with the shares that were open, and what is to be said of them."""

    config: AppConfig
    line: str | None
    """None where nothing was open, or there is no GPU."""


def shares_here(config: AppConfig) -> Placed:
    """`with_shares` by the GPUs of this machine, before Ray runs; raises as that."""
    return _of_each(config, lambda: [gpus_here()])


def shares_in_cluster(config: AppConfig) -> Placed:
    """`with_shares` by the count of the Ray cluster that this process is connected to; raises as that."""
    return _of_each(config, gpus_of_cluster)


def _of_each(config: AppConfig, nodes: Callable[[], Sequence[Sequence[Gpu]]]) -> Placed:
    """Of all models; raises SettingsError where several would take GPUs and it is not said how many each has."""
    served = config.served()
    if not any(one.leaves_gpus_open() for one in served):
        return Placed(config, None)
    gpus = nodes()
    placed = [with_shares(one, gpus) for one in served]
    if served[0] is config:
        return placed[0]
    if any(one.line is not None for one in placed):
        raise SettingsError("models: give each num_gpus_per_verifier and num_gpus_per_drafter, or device cpu")
    names = ("num_gpus_per_verifier", "num_gpus_per_drafter")
    return Placed(config.with_served(tuple(one.config for one in placed), names), None)


def check_in_cluster(config: AppConfig) -> None:
    """Refuse what the nodes there are now cannot hold, which Ray would wait for without end.

    Raises:
        ValueError: names the resource, what takes it, what there is, and the settings to change.
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
    """A model's verifiers, each with its drafter, and its shared drafters."""
    own = config.drafter_share() if config.has_own_drafter() else None
    whose = "a verifier" if own is None else "a verifier with its drafter"
    bundles = pair_bundles(config.verifier_share(), own, config.num_ranks())
    groups = [Group(whose, bundles, _num_pairs(config), not config.may_span_nodes())]
    if shared := config.num_shared_drafters():
        groups.append(Group("a shared drafter", [config.drafter_share().bundle()], shared))
    return groups


def with_shares(config: AppConfig, nodes: Sequence[Sequence[Gpu]]) -> Placed:
    """The same settings with shares of GPUs, where they leave that to what there is.

    A pair takes one GPU each where two are free for it, else 0.7 and 0.3 of one. Without a GPU everything runs on CPUs,
    unless the settings ask for one.

    Args:
        nodes: the GPUs of each node.

    Raises:
        SettingsError: the GPUs there are do not suffice; one line that names the settings to change.
    """
    if not config.leaves_gpus_open():
        return Placed(config, None)
    total = sum(map(len, nodes))
    if total == 0:
        return Placed(_fixed(config, 0.0, 0.0), None)
    free = [sum(gpu.free for gpu in gpus) for gpus in nodes]
    # Where all are in use, one may do all the same: loading tells whether its memory holds the model.
    verifier, drafter = _shares(config, free if any(free) else [1])
    kind = next(gpu.name for gpus in nodes for gpu in gpus if gpu.free or not any(free))
    ranks = config.num_ranks()
    whose = "the verifier" if ranks == 1 else f"each of the verifier's {ranks} ranks"
    taken = f"{verifier:g} of a GPU for {whose}" + (f" and {drafter:g} for the drafter" if drafter else "")
    line = f"taking {taken}: {sum(free)} of {total} free here ({kind}); device cpu takes none"
    return Placed(_fixed(config, verifier, drafter), line)


def _shares(config: AppConfig, free: Sequence[int]) -> tuple[float, float]:
    """Of a verifier, or each of its ranks, and of a drafter; `free` has the GPUs of each node."""
    ranks, pairs = config.num_ranks(), _num_pairs(config)
    drafts, shared = config.has_channel() and config.choice().needs_gpu, config.num_shared_drafters()
    apart = shared > 0 or config.may_span_nodes()
    drafters = (shared or pairs) if drafts else 0
    beside = 1 if drafts and not apart else 0
    places = sum(number // (ranks + beside) for number in free)
    if places >= pairs and sum(free) >= pairs * ranks + drafters:
        return 1.0, 1.0 if drafts else 0.0
    if ranks == 1 and drafts and sum(free) >= max(pairs, drafters):
        return WITH_DRAFTER, BESIDE
    wanted = f"{pairs * ranks} for verifiers" + (f" and {drafters} for drafters" if drafters else "")
    raise SettingsError(
        f"num_gpus_per_verifier is not given, and {wanted} are more GPUs than the {sum(free)} there: give "
        "num_gpus_per_verifier and num_gpus_per_drafter, have fewer replicas or ranks, or use device cpu"
    )


def _num_pairs(config: AppConfig) -> int:
    """Verifiers that there are at the least."""
    if config.autoscaling_config is not None:
        return max(1, config.autoscaling_config.get("min_replicas", 1))
    return config.num_replicas or 1


def _fixed(config: AppConfig, verifier: float, drafter: float) -> AppConfig:
    given = {name: getattr(config, name) for name in config.model_fields_set}
    try:
        return AppConfig(**given, num_gpus_per_verifier=verifier, num_gpus_per_drafter=drafter)
    except ValidationError as error:
        raise SettingsError(first_problem(error, AppConfig)) from None
