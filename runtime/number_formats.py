"""Number formats that a device computes in."""

import torch

LEAST_CAPABILITY = (8, 9)
"""Lowest compute capability whose kernels convert float8_e4m3fn."""


def check_fp8(setting: str, device: torch.device) -> None:
    """Refuses a GPU whose kernels cannot convert float8_e4m3fn; all CPUs can convert it.

    Args:
        setting: name of the setting that is "fp8".

    Raises:
        ValueError: the GPU's compute capability is too low; the message names the setting and both capabilities.
    """
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        least, own = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, found))
        raise ValueError(f"{setting} is fp8: the GPU's compute capability is {own}, {least} is needed; use auto")


def has_bfloat16_units() -> bool:
    """Whether this CPU has bfloat16 multiplication (AVX512-BF16 or AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
