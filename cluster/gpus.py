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
_LEAST_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""By CUDA's major version, for any of its minor ones (NVIDIA, CUDA Compatibility, "minor version compatibility")."""
_OLDER_TORCH = "--index-url https://download.pytorch.org/whl/cu126"
_GIB = 1 << 30
_KINDS = {
    **{"H200": 141, "H100": 80, "B200": 180, "A100-80G": 80, "A100-40G": 40, "A100": 40, "L40S": 48, "L4": 24},
    **{"A10G": 24, "A10": 24, "A40": 48, "T4": 16, "V100": 16, "RTX-4090": 24, "GeForce-RTX-4090": 24},
    **{"GeForce-RTX-5090": 32, "GeForce-RTX-3090": 24},
}
"""GiB of memory, by the names that Ray has for kinds of GPUs; the least where a kind comes in two sizes."""
_RAY_KIND = "accelerator_type:"


class Gpu(NamedTuple):
    """One GPU, before it is taken."""

    name: str = "GPU"
    total_bytes: int | None = None
    """None where nobody says."""
    free: bool = True
    """Nobody else computes there, and Ray has given nothing of it away."""


def gpus_here(dev: Path = Path("/dev")) -> list[Gpu]:
    """The GPUs of this machine that a process of this environment may use, in CUDA's order; no CUDA context is made.

    Args:
        dev: folder of the driver's device files, which are counted where NVIDIA's management library is missing.
    """
    from wingbeat.cluster import nvml  # late: an import of pynvml is slow, and the command line imports this file

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
        found.append(Gpu(device.name, device.total_bytes, device.used_bytes <= BUSY_SHARE * device.total_bytes))
    # A process sees one MIG instance of a machine's, of a size that the GPU's own does not tell.
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
    size = _KINDS.get(kind)
    whole, free = int(resources.get("GPU", 0)), int(available.get("GPU", 0))
    return [Gpu(kind, None if size is None else size * _GIB, index < free) for index in range(whole)]


def unseen_gpus(torch_version: str, cuda_version: str | None) -> str | None:
    """GPUs of this machine where torch sees none, and why it does not; None where the driver tells of none.

    Args:
        torch_version, cuda_version: as of `driver_problem`.
    """
    from wingbeat.cluster import nvml

    try:
        here = nvml.devices()
    except nvml.NVMLError:
        return None
    names = ", ".join(gpu.name for gpu in here)
    return f"{names} stays unused: {driver_problem(torch_version, cuda_version)}" if here else None


def driver_problem(torch_version: str, cuda_version: str | None) -> str:
    """Why torch sees no GPU, as far as the driver tells, and what to change: one line without an end.

    Args:
        torch_version: `torch.__version__`.
        cuda_version: `torch.version.cuda`, such as 13.0; None of a build without CUDA.
    """
    from wingbeat.cluster import nvml

    if cuda_version is None:
        return f"torch {torch_version} is built without CUDA: install a build with it"
    least = _LEAST_DRIVERS.get(cuda_version.partition(".")[0])
    needs = f"torch {torch_version} is of CUDA {cuda_version}"
    needs += "" if least is None else f", which needs driver {least} or newer"
    try:
        found = nvml.driver_version()
    except nvml.NVMLError as error:
        return f"torch sees no CUDA device here, and the driver does not answer ({error}); {needs}"
    if least is not None and int(found.partition(".")[0]) < least:
        other = f", or install torch of CUDA 12 ({_OLDER_TORCH}), which needs 525" if least > 525 else ""
        return f"the driver is {found}; {needs}: update the driver{other}"
    visible = os.environ.get(VISIBLE_DEVICES)
    return f"torch sees no CUDA device here; the driver is {found}, {needs}, and {VISIBLE_DEVICES} is {visible!r}"
