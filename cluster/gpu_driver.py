"""Explains why torch sees no GPU: compares NVIDIA's driver with torch's CUDA version."""

import os

from wingbeat.cluster.placement import VISIBLE_DEVICES

_LEAST_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""Minimum major version of the driver, by major version of CUDA; valid for each minor version of CUDA (NVIDIA, CUDA
Compatibility, "minor version compatibility").
"""
_OLDER_TORCH = "--index-url https://download.pytorch.org/whl/cu126"


def unseen_gpus(torch_version: str, cuda_version: str | None) -> str | None:
    """Text with the names of the GPUs that torch does not see, and the reason; None if the driver reports no GPUs.

    Args:
        torch_version, cuda_version: as in `driver_problem`.
    """
    from wingbeat.cluster import nvml

    try:
        here = nvml.devices()
    except nvml.NVMLError:
        return None
    names = ", ".join(gpu.name for gpu in here)
    return f"{names} stays unused: {driver_problem(torch_version, cuda_version)}" if here else None


def driver_problem(torch_version: str, cuda_version: str | None) -> str:
    """Why torch sees no GPU, as far as the driver reveals this, and what to change.

    The text is one line without a final period.

    Args:
        torch_version: `torch.__version__`.
        cuda_version: `torch.version.cuda`, such as 13.0; None for a build without CUDA.
    """
    from wingbeat.cluster import nvml

    if cuda_version is None:
        return f"torch {torch_version} is built without CUDA: install a build with it"
    least = _LEAST_DRIVERS.get(cuda_version.partition(".")[0])
    needs = f"torch {torch_version} is built for CUDA {cuda_version}"
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
