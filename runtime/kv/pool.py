"""The KV pool: one key and one value tensor per layer, addressed by block id."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import pool_table
from wingbeat.runtime.config import CPU_KV_CACHE_BYTES, EngineConfig

FREE_GPU_SHARE = 0.85
"""The rest is for activations, captured graphs and what the drafter beside it holds."""


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention as the probe saw it (`wingbeat.runtime.verifier.probe.probe_attention`)."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None

    @property
    def kv_size(self) -> int:
        """Numbers of a position's key and value over all heads."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KVCache:
    """Paged keys and values of all layers; block 0 belongs to nobody and takes the writes of padding rows.

    Raises:
        ValueError: the memory budget does not hold one sequence of max_model_len.
    """

    def __init__(
        self, layers: list[LayerAttention], config: EngineConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = config.block_size
        self.block_bytes = block_bytes(layers, config.block_size, dtype)
        budget = memory_budget(config, device)
        self.num_blocks = config.num_kv_blocks or budget // self.block_bytes
        if self.num_blocks < config.max_blocks_per_seq + 1:
            need = (config.max_blocks_per_seq + 1) * self.block_bytes
            raise ValueError(
                f"kv_cache_memory_bytes is {budget}: one sequence of max_model_len {config.max_model_len} needs "
                f"{need}; raise it or lower max_model_len"
            )
        # More blocks than all slots can ever hold, prefix cache included four times over, would only cost memory.
        if config.num_kv_blocks is None:
            self.num_blocks = min(self.num_blocks, 1 + 4 * config.max_num_seqs * config.max_blocks_per_seq)
        self.layers: list[tuple[Tensor, Tensor]] = [
            tuple(
                torch.zeros(self.num_blocks, config.block_size, layer.num_kv_heads, dim, dtype=dtype, device=device)
                for dim in (layer.key_dim, layer.value_dim)
            )
            for layer in layers
        ]
        self.table = pool_table(self.layers)
        """For moves over all layers; its address is in the captured ones."""


def memory_budget(config: EngineConfig, device: torch.device) -> int:
    """Bytes of the pool where its blocks are not counted; the weights must be on the device already."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type != "cuda":
        return CPU_KV_CACHE_BYTES
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(FREE_GPU_SHARE * config.gpu_share * free_bytes)


def block_bytes(layers: list[LayerAttention], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    per_token = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    return per_token * block_size * dtype.itemsize
