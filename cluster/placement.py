"""Placement of verifiers and drafters in a Ray cluster: one placement group for each pair, and assignment of GPUs.

All bundles of a group lie on one node, unless the settings allow the drafter on another node. A verifier of several
ranks has a bundle for each rank; the bundles of ranks 1 and up come last in the group.

By default Ray sets CUDA_VISIBLE_DEVICES so that an actor sees only its own GPUs, and a process cannot open memory of a
GPU that it does not see. Therefore `NO_NARROWING` makes Ray leave CUDA_VISIBLE_DEVICES unchanged, and each actor sets
the variable so that its own GPU comes first. Then device 0 is the actor's own GPU in every thread, and the other GPUs
stay reachable.

Ray is imported only inside functions, so that settings can be checked without Ray.
"""

import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

DRAFTER_BUNDLE = 1
"""Index of the drafter's bundle; Serve puts the replica itself into bundle 0."""
ONE_NODE, ANY_NODES = "STRICT_PACK", "PACK"
"""Placement strategies of a pair whose channel needs one node, and of a pair that may span two."""
NO_NARROWING = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
ROUNDING = 1e-6
ACCELERATOR_TYPE, ACCELERATOR_AMOUNT = "accelerator_type:", 0.001
"""Prefix of the resource by which Ray marks nodes with a type of GPU, and an amount so small that it never runs out."""

ChannelKind = Literal["shm", "cuda_ipc", "remote"]


class Share(NamedTuple):
    """CPUs, GPUs and other resources of one actor in Ray's units; actors with fractions of a GPU share the device."""

    num_cpus: float
    num_gpus: float = 0.0
    resources: dict[str, float] | None = None
    """Custom resources that only some nodes have."""

    def bundle(self) -> dict[str, float]:
        """The placement group bundle that holds this share; Ray refuses empty bundles and zero entries."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus, **(self.resources or {})}
        return {name: amount for name, amount in wanted.items() if amount > 0} or {"CPU": 0.001}

    def actor_options(self) -> dict[str, Any]:
        """Options that make an actor fill the bundle exactly."""
        bundle = self.bundle()
        options = {"num_cpus": bundle.pop("CPU", 0.0), "num_gpus": bundle.pop("GPU", 0.0)}
        return options | ({"resources": bundle} if bundle else {})

    def env_vars(self) -> dict[str, str]:
        """Environment of an actor with this share; lets an actor with a GPU see all GPUs of its node."""
        return {NO_NARROWING: "1"} if self.num_gpus > 0 else {}


def pair_bundles(
    verifier: Share, drafter: Share | None, num_ranks: int = 1, accelerator_type: str | None = None
) -> list[dict[str, float]]:
    """Bundles of one replica: the verifier's, the drafter's if there is one, then those of further ranks.

    Args:
        accelerator_type: Ray's name of the GPU type that the verifier's node must have; None allows any node.
    """
    kind = {} if accelerator_type is None else {f"{ACCELERATOR_TYPE}{accelerator_type}": ACCELERATOR_AMOUNT}
    first = verifier.bundle() | kind
    own = [first] if drafter is None else [first, drafter.bundle()]
    return own + [verifier.bundle() for _ in range(1, num_ranks)]


def drafter_options(drafter: Share) -> dict[str, Any]:
    """Actor options that put a drafter into the calling verifier's group.

    Raises:
        RuntimeError: the caller does not run in a placement group.
    """
    return actor_options(drafter, in_bundle(DRAFTER_BUNDLE))


def in_bundle(index: int) -> Any:
    """Scheduling strategy for a bundle of the caller's placement group; negative indices count from the end.

    Raises:
        RuntimeError: the caller does not run in a placement group.
    """
    from ray.util.placement_group import get_current_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = get_current_placement_group()
    if group is None:
        raise RuntimeError("ranks and drafters go into the verifier's placement group, and the caller has none")
    index %= group.bundle_count
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def actor_options(share: Share, strategy: Any) -> dict[str, Any]:
    """Options of an actor with this share and scheduling strategy."""
    options = {**share.actor_options(), "scheduling_strategy": strategy}
    # A share without environment variables gets no runtime_env. The actor then inherits its creator's runtime_env, and
    # Ray may use a worker process that is already running.
    return options | ({"runtime_env": {"env_vars": share.env_vars()}} if share.env_vars() else {})


def node_id() -> str:
    """Ray's id of the node that this process runs on."""
    import ray

    return ray.get_runtime_context().get_node_id()


def check_gpu_amount(name: str, amount: float) -> None:
    """Refuse amounts of GPUs that Ray cannot assign: an actor gets a fraction of one GPU, or whole GPUs.

    Raises:
        ValueError: names the field, the value and the allowed values.
    """
    if amount < 0 or (amount > 1 and amount != int(amount)):
        raise ValueError(f"{name} is {amount}: must be 0, a fraction up to 1, or a whole number")


def choose_channel(requested: str, verifier_device: str, drafter_device: str, one_node: bool = True) -> ChannelKind:
    """Kind of channel for a pair.

    Args:
        requested: 'auto', 'shm', 'cuda_ipc' or 'remote'; 'auto' is remote between two nodes, and on one node cuda_ipc
            if both sides are on CUDA devices, else shm.
        verifier_device, drafter_device: 'cpu' or 'cuda'.
        one_node: whether both sides run on one node.

    Raises:
        ValueError: cuda_ipc is requested and a side has no CUDA device; names the side.
    """
    if requested == "remote" or (requested == "auto" and not one_node):
        return "remote"
    sides = {"verifier": verifier_device, "drafter": drafter_device}
    on_cpu = [f"the {side} is on {device}" for side, device in sides.items() if device != "cuda"]
    if requested == "cuda_ipc" and on_cpu:
        raise ValueError(f"channel is 'cuda_ipc': both sides need a GPU, {' and '.join(on_cpu)}; use 'auto' or 'shm'")
    return "shm" if requested == "shm" or on_cpu else "cuda_ipc"


def own_devices_first(assigned: Sequence[int | str], visible: str | None, num_devices: int) -> str:
    """Value of CUDA_VISIBLE_DEVICES that lists a process's own GPUs first and hides no GPU.

    Args:
        assigned: ids of the process's GPUs, as `ray.get_gpu_ids` returns them: entries of `visible` if `visible` is not
            None.
        visible: CUDA_VISIBLE_DEVICES as the process found it; None if it is not set.
        num_devices: GPUs of the node; used if `visible` is None.

    Raises:
        ValueError: an assigned GPU is not among those that the process can see.
    """
    everyone = [str(i) for i in range(num_devices)] if visible is None else [e.strip() for e in visible.split(",")]
    own = [str(gpu) for gpu in assigned]
    for gpu in own:
        if gpu not in everyone:
            raise ValueError(f"Ray assigned GPU {gpu}, which is not among the GPUs of this process: {everyone}")
    return ",".join(own + [gpu for gpu in everyone if gpu not in own])


def assigned_devices() -> tuple[int | str, ...]:
    """Ids of the GPUs that Ray assigned to this actor; empty without a GPU share."""
    import ray

    return tuple(ray.get_gpu_ids())


def claim_devices(assigned: Sequence[int | str]) -> None:
    """Make the assigned GPU device 0 of this process; does nothing if no GPU is assigned.

    The process is the actor to which Ray assigned the GPU, or a child of the actor. Call this function before anything
    uses CUDA, because the driver reads the order of devices only once.

    Raises:
        RuntimeError: CUDA is initialised already.
        ValueError: the assigned GPU is hidden from this process.
    """
    import torch

    if not assigned:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError("GPUs must be claimed before CUDA is initialised in this process")
    visible = os.environ.get(VISIBLE_DEVICES)
    # Until CUDA is initialised, torch counts GPUs by NVML, and counts them again if CUDA_VISIBLE_DEVICES changes.
    num_devices = torch.cuda.device_count() if visible is None else 0
    os.environ[VISIBLE_DEVICES] = own_devices_first(assigned, visible, num_devices)
