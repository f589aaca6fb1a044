"""Checks whether this machine has enough memory for an engine. The check needs only the settings and the model's
config.
"""

from itertools import chain
from math import prod

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.parts import hooks
from wingbeat.runtime.config import LEAST_MODEL_LEN, EngineConfig
from wingbeat.runtime.free_memory import free_memory, total_memory
from wingbeat.runtime.kv.capacity import check_budget, fit
from wingbeat.runtime.parts import hooks as runtime_hooks
from wingbeat.runtime.tensor_files import read_headers, weight_files
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile

_UNEVEN = ("kv_lora_rank", "global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers")
"""Config fields that mark an architecture whose KV sizes cannot be computed from the usual fields."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number, by name of the dtype."""
GIB = 2**30
_BUDGETS = ("max_answer_bytes", "max_body_bytes")
"""Settings that bound the memory of a router."""
_INT64_BYTES = 8


def check_memory(config: AppConfig, file: ConfigFile) -> None:
    """Check, without importing torch, that KV pool and weights fit into the free memory.

    Raises:
        ValueError: KV pool or weights do not fit; the message is one line that names the setting and a value that fits.
    """
    engine, on_cpu = config.engine_config(), config.resolved_device() == "cpu"
    _check_budgets(config, on_cpu)
    _check_slots(config, engine)
    item_bytes = 1 if engine.kv_cache_dtype == "fp8" else ITEM_BYTES[config.resolved_dtype()]
    size = block_bytes(file, engine.block_size, item_bytes)
    free = free_memory() if on_cpu else None
    weights = _weight_bytes(config, file) if free is not None else 0
    if free is not None and weights > free:
        raise ValueError(
            f"dtype is {config.resolved_dtype()!r}: the weights of {file.folder} take {weights / GIB:.1f} GiB, "
            f"{free / GIB:.1f} GiB of memory are free"
        )
    budget = engine.kv_cache_memory_bytes
    if budget is None and free is not None:
        budget = int(engine.cpu_memory_utilization * (free - weights))
    if engine.num_kv_blocks is None and (size is None or budget is None):
        return
    engine = fit(engine, budget or 0, size or 1)
    num_blocks = engine.num_kv_blocks
    if engine.max_num_seqs > num_blocks - 1 and not engine.lower_max_num_seqs:
        raise ValueError(
            f"max_num_seqs is {engine.max_num_seqs}: the KV pool has {num_blocks - 1} blocks and a running sequence "
            f"holds at least one; lower it to {num_blocks - 1} or raise kv_cache_memory_bytes"
        )
    if free is not None and weights + num_blocks * (size or 0) > free:
        name = "kv_cache_memory_bytes" if config.num_kv_blocks is None else "num_kv_blocks"
        raise ValueError(
            f"{name} is {getattr(config, name)}: the KV pool takes {num_blocks * (size or 0) / GIB:.1f} GiB beside "
            f"weights of {weights / GIB:.1f} GiB, {free / GIB:.1f} GiB of memory are free"
        )


def _check_budgets(config: AppConfig, on_cpu: bool) -> None:
    """Check that no setting reserves more memory than the machine has."""
    budgets = {name: getattr(config, name) for name in chain(_BUDGETS, *hooks("ram_settings"))}
    if on_cpu:
        budgets["kv_cache_memory_bytes"] = config.kv_cache_memory_bytes
    for name, num_bytes in budgets.items():
        check_budget(name, num_bytes or 0, total_memory(), "cpu")


def _check_slots(config: AppConfig, engine: EngineConfig) -> None:
    """Check that the memory of the sequences' slots fits into the machine's memory. Block tables, and token histories
    for a drafter, are allocated at start.
    """
    longest = LEAST_MODEL_LEN if engine.lower_max_model_len else engine.max_model_len
    tokens = longest if config.has_drafter() else 0
    num_bytes = engine.max_num_seqs * _INT64_BYTES * (tokens + longest // engine.block_size)
    free = free_memory()
    if free is not None and num_bytes > free:
        raise ValueError(
            f"max_num_seqs is {engine.max_num_seqs}: the tables of that many sequences of {longest} tokens take "
            f"{num_bytes / GIB:.1f} GiB, {free / GIB:.1f} GiB of memory are free; lower it or max_model_len"
        )


def block_bytes(file: ConfigFile, block_size: int, item_bytes: int) -> int | None:
    """Return the bytes of one KV block over all layers; None for architectures whose config does not state the KV
    sizes.
    """
    if any(file.text.get(name) for name in _UNEVEN) or any(uneven(file.text) for uneven in runtime_hooks("uneven_kv")):
        return None
    layers, heads, hidden = (file.size(n) for n in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if layers is None or heads is None or hidden is None:
        return None
    head_dim, kv_heads = file.size("head_dim") or hidden // heads, file.size("num_key_value_heads") or heads
    return layers * kv_heads * 2 * head_dim * block_size * item_bytes


def _weight_bytes(config: AppConfig, file: ConfigFile) -> int:
    """Return the bytes of the weights once they are loaded. Returns 0 if the weights are quantised, because the files'
    headers do not state the loaded size.
    """
    if file.quantization is not None:
        return 0
    headers = read_headers(weight_files(file.folder))
    return sum(prod(header.shape) for header in headers.values()) * ITEM_BYTES[config.resolved_dtype()]
