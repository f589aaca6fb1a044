"""Checks of a machine's GPUs, in the order in which starting a server depends on them. Torch is imported only inside
the checks.
"""

import os
import shutil

from wingbeat.cluster.gpu_driver import unseen_gpus
from wingbeat.cluster.nvml import NVMLError, driver_version
from wingbeat.deployments.doctor.examination import Part, Verdict
from wingbeat.deployments.doctor.machine import gib


def gpu_parts(seen: bool) -> list[Part]:
    """Return the checks of the first GPU, in the order in which starting a server depends on them. If `seen` is False,
    return a single check, which reports why torch finds no GPU.
    """
    if not seen:
        return [Part("GPU", 30, _no_gpu)]
    return [
        Part("driver", 30, _driver),
        Part("GPU", 60, _gpu),
        Part("GPU kernels", 600, _gpu_kernels),
        Part("CUDA IPC", 120, _ipc),
        Part("CUDA graphs", 120, _graphs),
    ]


def _no_gpu() -> tuple[Verdict, str]:
    import torch

    unseen = unseen_gpus(torch.__version__, torch.version.cuda)
    if unseen is None:
        return Verdict.WARNING, f"torch {torch.__version__} sees none: everything runs on the CPU"
    return Verdict.FAILED, unseen


def _driver() -> tuple[Verdict, str]:
    import torch

    needs = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    try:
        return Verdict.OK, f"{driver_version()}; {needs}"
    except NVMLError as error:  # some containers have the driver without its library
        return Verdict.WARNING, f"unknown, as {error}; {needs}, and sees a GPU"


def _gpu() -> tuple[Verdict, str]:
    import torch

    lines = []
    for index in range(torch.cuda.device_count()):
        gpu, capability = torch.cuda.get_device_properties(index), torch.cuda.get_device_capability(index)
        lines.append(f"{gpu.name} {'.'.join(map(str, capability))} {gib(gpu.total_memory)}")
    x = torch.arange(1024, device="cuda", dtype=torch.float32)
    if (x @ x).item() != float(sum(i * i for i in range(1024))):
        return Verdict.FAILED, f"{'; '.join(lines)}: a sum of squares comes out wrong"
    return Verdict.OK, f"CUDA {torch.version.cuda}; {'; '.join(lines)}"


def _gpu_kernels() -> tuple[Verdict, str]:
    import torch

    from wingbeat.kernels.choice import KERNELS
    from wingbeat.kernels.comparison_inputs import Shape
    from wingbeat.kernels.parts import hooks

    if shutil.which(os.environ.get("CC", "cc")) is None and shutil.which("gcc") is None:
        return Verdict.FAILED, "Triton needs a C compiler: install gcc, or serve with --kernels torch"
    device = torch.device("cuda", 0)
    found = [difference for check in hooks("replace_wrong") for difference in check(device, Shape())]
    if found:
        return Verdict.WARNING, f"torch's operations replace {'; '.join(map(str, found))}"
    return Verdict.OK, f"{len(KERNELS)} kernels compile and compute what torch does"


def _ipc() -> tuple[Verdict, str]:
    import torch

    from wingbeat.cluster.channels.header import ChannelError
    from wingbeat.deployments.parts import hooks

    first, carried = torch.device("cuda", 0), []
    for index in range(min(torch.cuda.device_count(), 2)):
        peer = torch.device("cuda", index)
        try:
            for try_channel in hooks("try_device_channel"):
                try_channel(first, peer)
        except ChannelError as error:
            done = f"{', '.join(carried)}: works; " if carried else ""
            return Verdict.WARNING, f"{done}{first} to {peer}: {error}; --channel auto uses host memory there"
        carried.append(f"{first} to {peer}")
    return Verdict.OK, f"works between two processes, {', '.join(carried)}"


def _graphs() -> tuple[Verdict, str]:
    import torch

    from wingbeat.runtime.graphs.graph_device import CudaGraphDevice

    graphs, static = CudaGraphDevice(torch.device("cuda", 0)), torch.zeros(64, 64, device="cuda")

    def double() -> torch.Tensor:
        return (static @ torch.eye(64, device="cuda")) * 2

    graphs.warm_up(double)
    graph, out = graphs.capture(double, graphs.new_pool())
    static.copy_(torch.arange(64 * 64, device="cuda").view(64, 64) % 7)
    graphs.replay(graph)
    if not torch.equal(out, static * 2):
        return Verdict.FAILED, "a replay computes other results than the captured function: serve with --no-cuda-graphs"
    return Verdict.OK, "captured and replayed"
