"""Which GPUs there are before anything runs on one: of this machine without CUDA, of a Ray cluster by its own count."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.cluster.placement import VISIBLE_DEVICES

if TYPE_CHECKING:
    from wingbeat.cluster.nvml import Device

BUSY_SHARE = 0.1
"""Of a GPU's memory; where more is used, somebody else computes there. A desktop takes less."""
_RAY_KIND = "accelerator_type:"


class Gpu(NamedTuple):
    """GPU before it is taken."""

    name: str = "GPU"
    free: bool = True
    """Nobody else computes there, and Ray has given nothing of it away."""


def gpus_here(dev: Path = Path("/dev")) -> list[Gpu]:
    """The GPUs of this machine that a process of this environment may use, in CUDA's order; no CUDA context is made.

    Args:
        dev: folder of the driver's device files, which are counted where NVIDIA's management library is missing.
    """
    from wingbeat.cluster import nvml  # late: an import of pynvml is slow, and a cluster's GPUs need none

    visible = os.environ.get(VISIBLE_DEVICES)
    try:
        devices = nvml.devices()
    except nvml.NVMLError:
        files = [path for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        named = _named(visible)
        return [Gpu()] * min(len(files), len(files) if named is None else len(named))
    return _visible(devices, visible)


def _named(visible: str | None) -> list[str] | None:
    """Entries of CUDA_VISIBLE_DEVICES up to the first that is none, as CUDA reads it; None where it is not set."""
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
        if entry.startswith("MIG-"):  # a part of a GPU, which the library counts apart
            return [Gpu("MIG instance")]
        device = next((d for i, d in enumerate(devices) if entry == str(i) or d.uuid.startswith(entry)), None)
        if device is None:
            break
        if device.is_divided:
            divided = True
        found.append(Gpu(device.name, device.used_bytes <= BUSY_SHARE * device.total_bytes))
    # A process sees one MIG instance of a machine's.
    return [Gpu("MIG instance")] if divided else found


def gpus_of_cluster() -> list[list[Gpu]]:
    """GPUs of each live node of the Ray cluster that this process is connected to."""
    import ray
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [gpus_of_node(node["Resources"], available.get(node["NodeID"], {})) for node in nodes]


def gpus_of_node(resources: Mapping[str, float], available: Mapping[str, float]) -> list[Gpu]:
    """A node's GPUs, as Ray counts them: those of which nothing is given away are free."""
    kind = next((name.removeprefix(_RAY_KIND) for name in resources if name.startswith(_RAY_KIND)), "GPU")
    whole, free = int(resources.get("GPU", 0)), int(available.get("GPU", 0))
    return [Gpu(kind, index < free) for index in range(whole)]
