"""Attention of query rows over a paged KV cache on a GPU: prompt chunks, plain decodes and draft trees in one kernel.

The context of a request is split over programs until they fill the device; a second kernel merges the splits by their
log-sum-exp (Flash-Decoding, Dao et al. 2023). The length of a split depends on the request's own length and on the size
of the batch, so that the bits of a request's result do not depend on the other requests. The grid depends on shapes
alone, never on device data, so a launch can be captured in a CUDA graph and replayed with other lengths. The splits of
those lengths are distributed over the same programs.

Reference: `wingbeat.kernels.attention.reference`.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from wingbeat.kernels.attention.reference import values_in_keys
from wingbeat.kernels.gpu.attention.device import KNOWN, DeviceLimits, device_limits
from wingbeat.kernels.gpu.attention.kernel import tree_attention_kernel
from wingbeat.kernels.gpu.attention.splits import (
    FIXED_SPLITS,
    MAX_SPLITS,
    MOST_BYTES,
    Splits,
    choose_num_splits,
    choose_splits,
    merge_splits_kernel,
    merged_heads,
    split_size,
    workspace_size,
)
from wingbeat.kernels.gpu.attention.tiles import TileConfig, fixed_tile, tile_config
from wingbeat.kernels.launching import options

_RESIDENT: dict[tuple, int] = {}
"""Programs that a multiprocessor holds at once, by the parameters that a kernel variant is compiled for."""


class _Partial(NamedTuple):
    """Buffers for the splits' results, or their dtypes (to compile without a launch)."""

    out: Any
    """float32 [num_splits, num_reqs, num_query, num_heads, value_dim]: normalised results."""
    lse: Any
    """float32 [num_splits, num_reqs, num_query, num_heads]: log2-sum-exp2 of the logits."""


class _Launch(NamedTuple):
    """Arguments of the attention kernel that do not depend on splits."""

    tensors: tuple[Tensor | None, ...]
    strides: tuple[int, ...]
    scalars: tuple[Any, ...]
    out: Tensor
    constants: dict[str, Any]

    def arguments(self, partial: _Partial | None, splits: Splits) -> tuple[Any, ...]:
        """Returns the arguments of `tree_attention_kernel` except the constants."""
        return (*self.tensors, self.out, *(partial or (None, None)), *self.strides, *self.scalars, *splits)

    def merge_arguments(self, partial: _Partial, splits: Splits) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments and the constants of `merge_splits_kernel`."""
        num_reqs, num_query, num_heads, value_dim = self.out.shape
        contexts, (window, _, _, num_new, _, max_keys, _) = self.tensors[4], self.scalars[2:]
        window = None if self.constants["ALIKE"] else window
        constants = {
            "NUM_HEADS": num_heads,
            "VALUE_DIM": value_dim,
            "BLOCK_VALUE_DIM": triton.next_power_of_2(value_dim),
            "BLOCK_KEYS": self.constants["BLOCK_KEYS"],
            "ALL_SPLITS": FIXED_SPLITS.most if self.constants["ALIKE"] else MAX_SPLITS,
            "BLOCK_SPLITS": 4,
            "num_warps": 1,
            **options(fused=not self.constants["ALIKE"]),
        }
        rows = num_reqs * num_query
        lengths = (window, num_query, num_new, max_keys, *splits, merged_heads(rows, num_heads))
        cells = rows * num_heads
        return (partial.out, partial.lse, self.out, contexts, cells, *self.out.stride()[:3], *lengths), constants


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    num_context: Tensor,
    positions: Tensor | None,
    mask_words: Tensor | None,
    scaling: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    config: TileConfig | None = None,
    splits: Splits | None = None,
    alike: bool = False,
) -> Tensor:
    """Launches attention for `wingbeat.kernels.attention.reference.tree_attention`, which checks the arguments.

    Args:
        workspace: float32, at least `workspace_size` elements; None allocates a new one.
        config: overrides the table of tile configurations.
        splits: overrides `choose_splits`, or `FIXED_SPLITS` if `alike`; all requests are then in one launch.
    """
    if alike and splits is None:
        arguments = (query, key_cache, value_cache, block_tables, num_context, positions, mask_words, scaling)
        return _attend_alike(*arguments, sliding_window=sliding_window, softcap=softcap, sinks=sinks, out=out)
    num_reqs, num_query, num_heads, key_dim = query.shape
    block_size, num_kv_heads, value_dim = key_cache.shape[1], key_cache.shape[2], value_cache.shape[3]
    num_rows = num_heads // num_kv_heads * num_query
    limits = device_limits(query.device.index or 0) if query.is_cuda else KNOWN["H100"]
    if config is None:
        kind = query.dtype, max(key_dim, value_dim)
        config = fixed_tile(*kind, limits) if alike else tile_config(*kind, num_rows, limits)
    num_programs = triton.cdiv(num_rows, config.block_rows) * num_kv_heads
    max_keys = block_tables.shape[1] * block_size
    if out is None:
        out = query.new_empty(num_reqs, num_query, num_heads, value_dim)
    if num_reqs * num_programs == 0:
        return out
    if query.stride(3) != 1:
        query = query.contiguous()
    launch = _prepare(
        query, key_cache, value_cache, block_tables, num_context, positions, mask_words, scaling, sliding_window,
        softcap, sinks, out, config, alike,
    )  # fmt: skip
    # Triton launches on the current device, which may differ from the tensors' device.
    with torch.cuda.device_of(query):
        device_programs = limits.num_sms * _resident_programs(launch) if query.is_cuda else 1
        if splits is None:
            split_bytes = 4 * split_size(num_query, num_heads, value_dim)
            splits = choose_splits(num_reqs, num_programs, device_programs, config, split_bytes)
        if sliding_window is not None and not alike:
            num_new = num_query if mask_words is None else positions.shape[1]
            max_keys = min(max_keys, sliding_window + num_new + config.block_keys)
        filling = choose_num_splits(num_programs, device_programs) if alike else splits.most
        grid = (splits.launched(num_reqs, max_keys, filling) * num_programs,)
        num_splits = splits.at_most(max_keys)
        if num_splits == 1:
            tree_attention_kernel[grid](*launch.arguments(None, splits), SPLIT=False, **launch.constants)
            return out
        partial = _partial_results(out, num_splits, workspace)
        tree_attention_kernel[grid](*launch.arguments(partial, splits), SPLIT=True, **launch.constants)
        arguments, constants = launch.merge_arguments(partial, splits)
        grid = (num_reqs * num_query, triton.cdiv(num_heads, merged_heads(num_reqs * num_query, num_heads)))
        merge_splits_kernel[grid](*arguments, **constants)
    return out


def _attend_alike(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    num_context: Tensor,
    positions: Tensor | None,
    mask_words: Tensor | None,
    scaling: float,
    *,
    out: Tensor | None,
    **options: Any,
) -> Tensor:
    """Batch-invariant attention, in launches of as many requests as `MOST_BYTES` allows.

    Raises:
        ValueError: there are more than 64 new rows under a mask, or more keys than `FIXED_SPLITS` covers.
    """
    num_reqs, num_query, num_heads, _ = query.shape
    value_dim, max_keys, splits = value_cache.shape[3], block_tables.shape[1] * key_cache.shape[1], FIXED_SPLITS
    if mask_words is not None and mask_words.shape[2] > 1:
        raise ValueError(
            f"mask_words has {mask_words.shape[2]} words a row: deterministic attention takes 1 (64 nodes)"
        )
    if max_keys > splits.most * splits.least_keys:
        raise ValueError(
            f"tables hold {max_keys} keys: deterministic attention takes {splits.most * splits.least_keys}"
        )
    if out is None:
        out = query.new_empty(num_reqs, num_query, num_heads, value_dim)
    size = 4 * workspace_size(splits.at_most(max_keys), 1, num_query, num_heads, value_dim)
    at_once = max(MOST_BYTES // max(size, 1), 1)
    for begin in range(0, num_reqs, at_once):
        some = slice(begin, begin + at_once)
        rows = (block_tables[some], num_context[some])
        masks = (None if part is None else part[some] for part in (positions, mask_words))
        tree_attention(
            query[some], key_cache, value_cache, *rows, *masks, scaling,
            **options, out=out[some], splits=splits, alike=True,
        )  # fmt: skip
    return out


def _prepare(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    num_context: Tensor,
    positions: Tensor | None,
    mask_words: Tensor | None,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
    config: TileConfig,
    alike: bool,
) -> _Launch:
    num_reqs, num_query, num_heads, key_dim = query.shape
    block_size, num_kv_heads, value_dim = key_cache.shape[1], key_cache.shape[2], value_cache.shape[3]
    group = num_heads // num_kv_heads
    rest_dim = key_dim - value_dim if values_in_keys(key_cache, value_cache) else 0
    key_dim -= rest_dim
    causal = mask_words is None
    place = None if causal or sliding_window is None else positions
    strides = (
        *query.stride()[:3],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_tables.stride(0),
        0 if causal else positions.stride(0),
        *((0, 0) if causal else mask_words.stride()[:2]),
        *out.stride()[:3],
    )
    scalars = (
        float(scaling),
        None if softcap is None else float(softcap),
        sliding_window,
        num_reqs,
        num_query,
        num_query if causal else positions.shape[1],
        0 if causal else mask_words.shape[2],
        block_tables.shape[1] * block_size,
        triton.cdiv(group * num_query, config.block_rows),
    )
    constants = {
        "GROUP": group,
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_KEY_DIM": max(16, triton.next_power_of_2(key_dim)),
        "BLOCK_VALUE_DIM": max(16, triton.next_power_of_2(value_dim)),
        "REST_DIM": rest_dim,
        "BLOCK_REST_DIM": max(16, triton.next_power_of_2(rest_dim)),
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_KEYS": config.block_keys,
        "TAIL_KEYS": min(config.block_keys, 64),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "ALIKE": alike,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        # Masked and unmasked tiles are different code, which the compiler might round differently if it fused
        # operations.
        **options(fused=not alike),
    }
    tensors = (query, key_cache, value_cache, block_tables, num_context, place, mask_words, sinks)
    return _Launch(tensors, strides, scalars, out, constants)


def _partial_results(out: Tensor, num_splits: int, workspace: Tensor | None) -> _Partial:
    """Allocates buffers for the splits' results, inside the workspace if one is given."""
    num_reqs, num_query, num_heads, value_dim = out.shape
    needed = workspace_size(num_splits, num_reqs, num_query, num_heads, value_dim)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=out.device)
    elif workspace.dtype != torch.float32 or workspace.numel() < needed:
        raise ValueError(f"workspace is {workspace.numel()} x {workspace.dtype}: {needed} x torch.float32 needed")
    rows = num_splits * num_reqs * num_query * num_heads
    flat = workspace.view(-1)
    return _Partial(flat[: rows * value_dim], flat[rows * value_dim : needed])


def partial_bytes(
    dtype: torch.dtype,
    rows: tuple[int, int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    max_keys: int,
    limits: DeviceLimits,
    alike: bool = False,
) -> int:
    """Estimates the bytes of the splits' results in a launch, from the table of tiles, before anything is compiled.

    Args:
        rows: number of requests, and of query rows per request.
        heads: number of query heads, and of KV heads.
        dims: dimension of keys, and of values.
        max_keys: maximum number of keys of a request.
    """
    if alike:
        size = 4 * workspace_size(FIXED_SPLITS.at_most(max_keys), 1, rows[1], heads[0], dims[1])
        return min(rows[0] * size, max(MOST_BYTES, size))
    num_rows = heads[0] // heads[1] * rows[1]
    config = tile_config(dtype, max(dims), num_rows, limits)
    device_programs = limits.num_sms * limits.resident_programs(config.shared_bytes, 1, config.num_warps)
    num_programs = triton.cdiv(num_rows, config.block_rows) * heads[1]
    split_bytes = 4 * split_size(rows[1], heads[0], dims[1])
    splits = choose_splits(rows[0], num_programs, device_programs, config, split_bytes)
    return 4 * workspace_size(splits.at_most(max_keys), *rows, heads[0], dims[1])


def _resident_programs(launch: _Launch) -> int:
    """Number of programs of a launch that a multiprocessor holds at once, from the compiled kernel's resources.

    The first launch of a kind compiles the kernel both with and without splits, because lengths decide which variant a
    round needs, and no later round may wait for kernel compilation.
    """
    query, key_cache = launch.tensors[:2]
    given = tuple(tensor is not None for tensor in launch.tensors)
    index, constants = query.device.index or 0, launch.constants
    key = (index, query.dtype, key_cache.dtype, given, launch.scalars[1:3], *constants.values())
    if key not in _RESIDENT:
        partial = _Partial(torch.float32, torch.float32)
        splits = Splits(1, constants["BLOCK_KEYS"])
        one = (1,)
        tree_attention_kernel.warmup(*launch.arguments(None, splits), SPLIT=False, grid=one, **constants)
        arguments, merge_constants = launch.merge_arguments(partial, splits)
        merge_splits_kernel.warmup(*arguments, grid=one, **merge_constants)
        compiled = tree_attention_kernel.warmup(*launch.arguments(partial, splits), SPLIT=True, grid=one, **constants)
        if compiled is None:  # kernels are interpreted, so there is no multiprocessor to fill
            return 1
        _ = compiled.run  # loads the kernel, so that its register count is known
        _RESIDENT[key] = device_limits(index).resident_programs(
            compiled.metadata.shared,
            compiled.n_regs,
            constants["num_warps"],
            getattr(compiled.metadata, "tmem_size", None) or 0,
        )
    return _RESIDENT[key]
