"""The KV pool: keys and values of each layer, addressed by block id."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import copy_kv, move_kv, pool_table
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.free_memory import free_memory, total_memory
from wingbeat.runtime.kv.blocks import KeptBeside
from wingbeat.runtime.kv.capacity import check_budget, fit
from wingbeat.runtime.number_formats import check_fp8
from wingbeat.runtime.parts import first_result

UNKNOWN_RAM = 1 << 30
"""Bytes assumed to be free if the system does not report free memory."""
CONTEXT_BYTES = 600 << 20
"""Bytes that a process holds on a GPU before its first allocation: CUDA's context and library kernels."""


PoolMemory = Callable[[Sequence[tuple[int, ...]], torch.dtype, torch.device], list[Tensor]]
"""Allocates zero tensors of these shapes."""


@dataclass(frozen=True)
class LayerAttention:
    """Attention parameters of one layer, as probed by `wingbeat.runtime.verifier.layers.probe.probe_attention`.

    A layer without attention has 0 heads and needs no memory in the pool.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """Elements by which a position's KV head is stored: of the key, and of the value."""
        return self.key_dim, self.value_dim

    @property
    def kv_size(self) -> int:
        """Number of elements of a position's key and value, over all heads."""
        return self.num_kv_heads * sum(self.stored_dims)

    def caches(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Returns the caches of keys and of values, for tensors [.., num_kv_heads, dim] with `stored_dims`."""
        key, value = stored
        return key, value


NO_LAYERS: Mapping[int, int] = {}


class KVCache:
    """Paged keys and values of all layers. Block 0 is the null block, into which padding rows write.

    Args:
        dtype: dtype of the weights.
        memory: allocates keys and values; None uses the memory of host pages or of torch's allocator.
        num_blocks_of: number of blocks of layers that have blocks of their own, by layer.

    Raises:
        ValueError: the memory budget does not hold a sequence of max_model_len, or the GPU does not support
            float8_e4m3fn.
    """

    def __init__(
        self,
        layers: list[LayerAttention],
        config: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        memory: PoolMemory | None = None,
        num_blocks_of: Mapping[int, int] = NO_LAYERS,
    ) -> None:
        self.block_size = config.block_size
        dtype = kv_dtype(config, dtype)
        if dtype == torch.float8_e4m3fn:
            check_fp8("kv_cache_dtype", device)
        growing = [layer for index, layer in enumerate(layers) if index not in num_blocks_of]
        self.block_bytes = block_bytes(growing, config.block_size, dtype)
        if config.num_kv_blocks is None:
            config = fit(config, memory_budget(config, device), self.block_bytes)
        self.num_blocks = config.num_kv_blocks
        shapes = [
            (num_blocks_of.get(index, self.num_blocks), config.block_size, layer.num_kv_heads, dim)
            for index, layer in enumerate(layers)
            for dim in layer.stored_dims
        ]
        made = [zeros(shape, dtype, device) for shape in shapes] if memory is None else memory(shapes, dtype, device)
        parts = iter(made)
        self.tensors = [tuple(next(parts) for _ in layer.stored_dims) for layer in layers]
        """By layer, the tensors [num_blocks, block_size, num_kv_heads, dim] that hold the layer's KV."""
        self.layers = [layer.caches(held) for layer, held in zip(layers, self.tensors, strict=True)]
        """Keys and values of each layer, which may share memory."""
        self._stored = [held for held, layer in zip(self.tensors, layers, strict=True) if layer.kv_size]
        self.table = pool_table(self._stored)
        """Table of all layers' addresses, which `move` reads; captured graphs contain the table's own address."""

    beside: KeptBeside | None = None
    """Bookkeeping of the memory that layers with blocks of their own keep for prefixes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers' keys and values."""
        return sum(part.nbytes for held in self.tensors for part in held)

    def occupy(self, num_blocks: int) -> None:
        """Writes the contents of the first `num_blocks` blocks to the blocks again.

        Host memory that was never written has no pages of its own, so reading such memory is faster than reading KV.
        """
        for part in (part[:num_blocks].view(torch.uint8) for held in self._stored for part in held):
            part.copy_(part.clone())

    @property
    def prefix_layers(self) -> dict[int, tuple[Tensor, ...]]:
        """The tensors, by layer, of the layers that hold every block of a prefix."""
        return dict(enumerate(self.tensors))

    def own_pools(self) -> list[Tensor] | None:
        """Returns the layers' tensors, [num_blocks, block_size, heads, dim], for code that compacts KV itself.

        A subclass returns None if `move` has to be used, because other processes must be notified or positions have
        another layout.
        """
        return [part for held in self._stored for part in held]

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Moves the KV of accepted paths in all layers; arguments are those of `kernels.kv.reference.move_kv`."""
        if self.table is None:
            copy_kv(self._stored, from_slots, to_slots)
        else:
            move_kv(self._stored, from_slots, to_slots, self.table)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a zero tensor on a device; on the host, a page takes physical memory only after a write to that page."""
    mapped = first_result("host_zeros", shape, dtype) if device.type == "cpu" else None
    return torch.zeros(shape, dtype=dtype, device=device) if mapped is None else mapped


def memory_budget(
    config: EngineConfig, device: torch.device, reserved: int = 0, held_beside: int = 0, mapped: int = 0
) -> int:
    """Returns the bytes of a pool whose number of blocks is not configured. The weights must be on the device already.

    Args:
        reserved: bytes needed in addition to the pool, on a GPU.
        held_beside: bytes that the drafter's process holds on the same GPU.
        mapped: bytes that this process holds on the GPU outside torch's allocator, besides CUDA's context.

    Raises:
        ValueError: settings request more memory than the device has.
    """
    if config.kv_cache_memory_bytes is not None:
        has = total_memory() if device.type != "cuda" else torch.cuda.mem_get_info(device)[1]
        check_budget("kv_cache_memory_bytes", config.kv_cache_memory_bytes, has, device.type)
        return config.kv_cache_memory_bytes
    if device.type != "cuda":
        free = free_memory()
        return int(config.cpu_memory_utilization * (UNKNOWN_RAM if free is None else free))
    free, total = torch.cuda.mem_get_info(device)
    held = total - free
    if config.gpu_share < 1:
        # On a shared GPU, memory that other processes use is not subtracted from this engine's fraction.
        beside = held_beside + CONTEXT_BYTES if held_beside else 0
        held = min(held, torch.cuda.memory_reserved(device) + mapped + CONTEXT_BYTES + beside)
    allowed = int(config.gpu_memory_utilization * config.gpu_share * total)
    return min(allowed - held, free) - reserved


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of keys and values in the pool, for a model with weights of dtype `dtype`."""
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype


def block_bytes(layers: list[LayerAttention], block_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes of a block over all layers, for keys and values of dtype `dtype`."""
    return sum(layer.kv_size for layer in layers) * block_size * dtype.itemsize
