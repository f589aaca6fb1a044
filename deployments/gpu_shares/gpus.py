"""Lists GPUs before any process of the application runs on them: by NVML on this machine, by Ray's resources in a
cluster.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.cluster.placement import VISIBLE_DEVICES

if TYPE_CHECKING:
    from wingbeat.cluster.nvml import Device

BUSY_SHARE = 0.1
"""A GPU counts as in use if more than this fraction of its memory is in use. A desktop uses less memory."""
_RAY_KIND = "accelerator_type:"


class Gpu(NamedTuple):
    """A GPU that has not been assigned yet."""

    name: str = "GPU"
    free: bool = True
    """Whether the GPU is free: at most `BUSY_SHARE` of its memory is in use (on this machine), or Ray has assigned no
    part of it (in a cluster).
    """


def gpus_here(dev: Path = Path("/dev")) -> list[Gpu]:
    """Return the GPUs of this machine that CUDA_VISIBLE_DEVICES allows, in CUDA's order, without creating a CUDA
    context.

    Args:
        dev: folder of the driver's device files, which are counted if NVIDIA's management library is missing.
    """
    from wingbeat.cluster import nvml  # imported here because pynvml is slow, and not needed in a cluster

    visible = os.environ.get(VISIBLE_DEVICES)
    try:
        devices = nvml.devices()
    except nvml.NVMLError:
        files = [path for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        named = _named(visible)
        return [Gpu()] * min(len(files), len(files) if named is None else len(named))
    return _visible(devices, visible)


def _named(visible: str | None) -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES; None if the variable is not set. The list ends before the first
    invalid entry, as it does for CUDA.
    """
    if visible is None:
        return None
    entries = []
    for entry in (part.strip() for part in visible.split(",")):
        if not entry or entry.startswith("-") or not re.match(r"\d|GPU-|MIG-", entry):
            break
        entries.append(entry)
    return entries


def _visible(devices: "Sequence[Device]", visible: str | None) -> list[Gpu]:
    named = _named(visible)
    if named is None:
        named = [str(index) for index in range(len(devices))]
    found, divided = [], False
    for entry in named:
        if entry.startswith("MIG-"):  # the entry names a part of a GPU, which NVML does not list as a device
            return [Gpu("MIG instance")]
        device = next((d for i, d in enumerate(devices) if entry == str(i) or d.uuid.startswith(entry)), None)
        if device is None:
            break
        if device.is_divided:
            divided = True
        found.append(Gpu(device.name, device.used_bytes <= BUSY_SHARE * device.total_bytes))
    # Only one MIG instance is counted, because a process can use only one.
    return [Gpu("MIG instance")] if divided else found


def gpus_of_cluster() -> list[list[Gpu]]:
    """Return the GPUs of each live node of the Ray cluster to which this process is connected."""
    import ray
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [gpus_of_node(node["Resources"], available.get(node["NodeID"], {})) for node in nodes]


def gpus_of_node(resources: Mapping[str, float], available: Mapping[str, float]) -> list[Gpu]:
    """Return the GPUs of a node as counted by Ray. A GPU counts as free if Ray has assigned no part of it."""
    kind = next((name.removeprefix(_RAY_KIND) for name in resources if name.startswith(_RAY_KIND)), "GPU")
    whole, free = int(resources.get("GPU", 0)), int(available.get("GPU", 0))
    return [Gpu(kind, index < free) for index in range(whole)]
