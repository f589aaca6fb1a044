"""Computes how many blocks, sequences and tokens a memory budget holds, without importing torch."""

from dataclasses import replace

from wingbeat.runtime.config import LEAST_MODEL_LEN, EngineConfig

USUAL_LEN, LEAST_SEQS, SHARE_OF_SEQS = 1024, 16, 0.75
"""Three numbers for the case that memory decides the number of sequences: the tokens assumed per sequence, the minimum
number of sequences, and the fraction of free memory that sequences may use."""


def is_automatic(config: EngineConfig) -> bool:
    """Whether the pool's size depends on free memory."""
    return config.num_kv_blocks is None and config.kv_cache_memory_bytes is None


def check_budget(name: str, num_bytes: int, total: int | None, device: str) -> None:
    """Raises ValueError, with the setting's name, if `num_bytes` exceeds the device's `total` (None if unknown)."""
    if total is not None and num_bytes > total:
        owner = "the GPU" if device == "cuda" else "this machine"
        raise ValueError(f"{name} is {num_bytes}: {owner} has {total} bytes of memory; lower it")


def fit(config: EngineConfig, budget: int, block_bytes: int, num_positions: int | None = None) -> EngineConfig:
    """Returns the configuration with values for `num_kv_blocks` and `max_model_len`.

    Args:
        budget: bytes for KV blocks; used if `num_kv_blocks` is not set.
        block_bytes: bytes of one block, over all layers.
        num_positions: the model's number of positions; None if unknown.

    Raises:
        ValueError: the memory does not hold a sequence of max_model_len or, if max_model_len may be lowered, of a
            useful length. The message names the setting.
    """
    num_blocks = budget // block_bytes if config.num_kv_blocks is None else config.num_kv_blocks
    longest = config.max_model_len
    if config.lower_max_model_len:
        held = (num_blocks - 1) * config.block_size - config.speculation.num_nodes
        longest = min(longest, num_positions or longest, max(held, min(longest, LEAST_MODEL_LEN)))
    settled = replace(config, max_model_len=longest, lower_max_model_len=False, num_kv_blocks=None)
    needed = settled.max_blocks_per_seq + 1
    if num_blocks < needed:
        raise ValueError(_too_small(config, budget, num_blocks, longest, needed, needed * block_bytes))
    if config.num_kv_blocks is None:
        # A larger pool would only cost memory, because four times as many blocks as all slots can use leave enough
        # blocks for the prefix cache.
        num_blocks = min(num_blocks, 1 + 4 * config.max_num_seqs * settled.max_blocks_per_seq)
    return replace(settled, num_kv_blocks=num_blocks)


def num_seqs_held(config: EngineConfig, free: int, token_bytes: int, seq_bytes: int) -> int:
    """Returns the number of sequences of usual length that memory holds, found by halving max_num_seqs.

    Args:
        free: bytes that the weights leave free. Sequences may use the fraction `SHARE_OF_SEQS`; the rest is for longer
            contexts.
        token_bytes: bytes of a token's keys and values, including the drafter's keys and values if the drafter uses the
            same memory.
        seq_bytes: bytes of a sequence, independent of its length.
    """
    blocks = config.max_num_seqs if config.num_kv_blocks is None else max(config.num_kv_blocks - 1, 1)
    most = min(config.max_num_seqs, blocks)
    each = min(USUAL_LEN, config.max_model_len) * token_bytes + seq_bytes
    while most > LEAST_SEQS and most * each > SHARE_OF_SEQS * free:
        most = max(most // 2, LEAST_SEQS)
    return most


def _too_small(config: EngineConfig, budget: int, num_blocks: int, longest: int, blocks: int, num_bytes: int) -> str:
    one = f"one sequence of {'max_model_len ' if not config.lower_max_model_len else ''}{longest}"
    remedy = "raise it" if config.lower_max_model_len else "raise it or lower max_model_len"
    if config.num_kv_blocks is not None:
        return f"num_kv_blocks is {num_blocks}: {one} needs {blocks}; {remedy}"
    if config.kv_cache_memory_bytes is not None:
        return f"kv_cache_memory_bytes is {budget}: {one} needs {num_bytes}; {remedy}"
    return (
        f"{max(budget, 0)} bytes are left for KV beside the weights: {one} needs {num_bytes}; raise "
        "gpu_memory_utilization (on a GPU), give kv_cache_memory_bytes, or lower max_model_len"
    )
