"""Which GPUs have float8."""

import torch

LEAST_CAPABILITY = (8, 9)
"""Of a GPU whose kernels convert float8_e4m3fn."""


def check_fp8(setting: str, device: torch.device) -> None:
    """Refuse a GPU whose kernels cannot convert float8_e4m3fn; CPUs all can.

    Args:
        setting: that asks for it by "fp8".

    Raises:
        ValueError: names the setting and both capabilities.
    """
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        least, own = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, found))
        raise ValueError(f"{setting} is fp8: the GPU's compute capability is {own}, {least} is needed; use auto")
