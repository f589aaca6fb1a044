"""Chooses the GPU shares of verifiers and drafters if the settings give none. The choice depends on the number of free
GPUs, not on the size of their memory.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.gpu_shares.gpus import Gpu, gpus_here, gpus_of_cluster
from wingbeat.deployments.options.problems import SettingsError, first_problem
from wingbeat.deployments.parts import first_result

WITH_DRAFTER, BESIDE = 0.7, 0.3
"""Shares of one GPU on which a verifier and its drafter both run: WITH_DRAFTER for the verifier, BESIDE for the
drafter.
"""


class Placed(NamedTuple):
    """Settings with the chosen GPU shares."""

    config: AppConfig
    line: str | None
    """Message about the chosen shares; None if the settings gave the shares, or if there is no GPU."""


def take_gpus(config: AppConfig, in_cluster: bool, say: Callable[[str], None]) -> AppConfig:
    """Returns the settings with GPU shares for each model, and passes a message about them to `say`.

    Args:
        in_cluster: whether to count the GPUs of the Ray cluster of this process, or the GPUs of this machine.

    Raises:
        SettingsError: an error of `with_shares`, or several models would use GPUs but their settings give no shares.
    """
    served = config.served()
    if not any(one.leaves_gpus_open() for one in served):
        return config
    gpus = gpus_of_cluster() if in_cluster else [gpus_here()]
    placed = [with_shares(one, gpus) for one in served]
    if served[0] is not config:
        if any(one.line is not None for one in placed):
            raise SettingsError("models: give each num_gpus_per_verifier and num_gpus_per_drafter, or device cpu")
        names = ("num_gpus_per_verifier", "num_gpus_per_drafter")
        return first_result("with_served", config, tuple(one.config for one in placed), names)
    if placed[0].line is not None:
        say(placed[0].line)
    return placed[0].config


def with_shares(config: AppConfig, nodes: Sequence[Sequence[Gpu]]) -> Placed:
    """Returns the settings with GPU shares; if the settings give none, shares are chosen.

    Verifier and drafter get one GPU each if two GPUs are free for the pair, else 0.7 and 0.3 of one GPU. Without a GPU
    everything runs on CPUs, unless the settings require a GPU.

    Args:
        nodes: the GPUs of each node.

    Raises:
        SettingsError: there are not enough GPUs; the message is one line that names the settings to change.
    """
    if not config.leaves_gpus_open():
        return Placed(config, None)
    total = sum(map(len, nodes))
    if total == 0:
        return Placed(_fixed(config, 0.0, 0.0), None)
    free = [sum(gpu.free for gpu in gpus) for gpus in nodes]
    # Even if all GPUs are in use, one GPU counts as free. If the free memory of this GPU does not suffice for the
    # model, loading fails.
    verifier, drafter = _shares(config, free if any(free) else [1])
    kind = next(gpu.name for gpus in nodes for gpu in gpus if gpu.free or not any(free))
    ranks = config.num_ranks()
    whose = "the verifier" if ranks == 1 else f"each of the verifier's {ranks} ranks"
    taken = f"{verifier:g} of a GPU for {whose}" + (f" and {drafter:g} for the drafter" if drafter else "")
    line = f"taking {taken}: {sum(free)} of {total} free here ({kind}); device cpu takes none"
    return Placed(_fixed(config, verifier, drafter), line)


def _shares(config: AppConfig, free: Sequence[int]) -> tuple[float, float]:
    """Return the shares of a verifier (or of each of its ranks) and of a drafter.

    Args:
        free: number of free GPUs of each node.
    """
    ranks, pairs = config.num_ranks(), config.min_pairs()
    drafts, shared = config.has_channel() and config.choice().has_weights, config.num_shared_drafters()
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
        f"num_gpus_per_verifier is not given, and {wanted} are more GPUs than the {sum(free)} free ones: give "
        "num_gpus_per_verifier and num_gpus_per_drafter, have fewer replicas or ranks, or use device cpu"
    )


def _fixed(config: AppConfig, verifier: float, drafter: float) -> AppConfig:
    given = {name: getattr(config, name) for name in config.model_fields_set}
    try:
        return AppConfig(**given, num_gpus_per_verifier=verifier, num_gpus_per_drafter=drafter)
    except ValidationError as error:
        raise SettingsError(first_problem(error, AppConfig)) from None
