"""The KV pool: one key and one value tensor per layer, addressed by block id."""

import torch
from torch import Tensor

from wingbeat.kernels.kv_cache import pool_table
from wingbeat.runtime.attention import LayerAttention
from wingbeat.runtime.config import EngineConfig


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
        self.num_blocks = config.num_kv_blocks or config.kv_cache_memory_bytes // self.block_bytes
        if self.num_blocks < config.max_blocks_per_seq + 1:
            need = (config.max_blocks_per_seq + 1) * self.block_bytes
            raise ValueError(
                f"kv_cache_memory_bytes is {config.kv_cache_memory_bytes}: one sequence of max_model_len "
                f"{config.max_model_len} needs {need}; raise it or lower max_model_len"
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


def block_bytes(layers: list[LayerAttention], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    per_token = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    return per_token * block_size * dtype.itemsize
