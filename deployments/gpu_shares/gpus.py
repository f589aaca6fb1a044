"""Lists GPUs before anything runs on them: of this machine by NVML, of a Ray cluster by Ray's resources."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.cluster.placement import VISIBLE_DEVICES

if TYPE_CHECKING:
    from wingbeat.cluster.nvml import Device

BUSY_SHARE = 0.1
"""Share of a GPU's memory above which the GPU counts as in use. A desktop uses less."""
_RAY_KIND = "accelerator_type:"


class Gpu(NamedTuple):
    """A GPU that has not been assigned yet."""

    name: str = "GPU"
    free: bool = True
    """At most `BUSY_SHARE` of its memory is used (GPU of this machine), or Ray has assigned no part of it (cluster)."""


def gpus_here(dev: Path = Path("/dev")) -> list[Gpu]:
    """GPUs of this machine that CUDA_VISIBLE_DEVICES allows, in CUDA's order. Creates no CUDA context.

    Args:
        dev: folder of the driver's device files, which are counted if NVIDIA's management library is missing.
    """
    from wingbeat.cluster import nvml  # imported late: pynvml is slow, and a cluster's GPUs do not need it

    visible = os.environ.get(VISIBLE_DEVICES)
    try:
        devices = nvml.devices()
    except nvml.NVMLError:
        files = [path for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        named = _named(visible)
        return [Gpu()] * min(len(files), len(files) if named is None else len(named))
    return _visible(devices, visible)


def _named(visible: str | None) -> list[str] | None:
    """Valid entries of CUDA_VISIBLE_DEVICES before the first invalid one, as CUDA reads it; None if it is not set."""
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
        if entry.startswith("MIG-"):  # a part of a GPU, which NVML does not list as a device
            return [Gpu("MIG instance")]
        device = next((d for i, d in enumerate(devices) if entry == str(i) or d.uuid.startswith(entry)), None)
        if device is None:
            break
        if device.is_divided:
            divided = True
        found.append(Gpu(device.name, device.used_bytes <= BUSY_SHARE * device.total_bytes))
    # A process sees only one MIG instance of a machine.
    return [Gpu("MIG instance")] if divided else found


def gpus_of_cluster() -> list[list[Gpu]]:
    """GPUs of each live node of the Ray cluster to which this process is connected."""
    import ray
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [gpus_of_node(node["Resources"], available.get(node["NodeID"], {})) for node in nodes]


def gpus_of_node(resources: Mapping[str, float], available: Mapping[str, float]) -> list[Gpu]:
    """A node's GPUs by Ray's count. GPUs of which Ray has assigned no part are free."""
    kind = next((name.removeprefix(_RAY_KIND) for name in resources if name.startswith(_RAY_KIND)), "GPU")
    whole, free = int(resources.get("GPU", 0)), int(available.get("GPU", 0))
    return [Gpu(kind, index < free) for index in range(whole)]
