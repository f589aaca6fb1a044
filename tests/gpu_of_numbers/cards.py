"""Properties and memory of several GPUs."""

from typing import NamedTuple

MIB = 1 << 20
CONTEXT_BYTES = 500 * MIB
"""Device memory of a process with a CUDA context, before its first allocation."""


class Card(NamedTuple):
    """Fields as in `torch.cuda.get_device_properties`."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    shared_memory_per_block_optin: int
    """Bytes."""
    shared_memory_per_multiprocessor: int
    """Bytes."""
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    warp_size: int = 32
    L2_cache_size: int = 50 * MIB
    is_integrated: bool = False
    uuid: str = "00000000-0000-0000-0000-000000000000"


# NVIDIA's CUDA C++ programming guide, table of compute capabilities, and what nvidia-smi shows as total.
CARDS = {
    "H100": Card("NVIDIA H100 80GB HBM3", 9, 0, 132, 81559 * MIB, 232448, 233472),
    "A100": Card("NVIDIA A100-SXM4-80GB", 8, 0, 108, 81920 * MIB, 166912, 167936),
    "L4": Card("NVIDIA L4", 8, 9, 58, 23034 * MIB, 101376, 102400, 1536),
    "RTX 5090": Card("NVIDIA GeForce RTX 5090", 12, 0, 170, 32607 * MIB, 101376, 102400, 1536, L2_cache_size=96 * MIB),
}
