"""Compile the attention and KV kernels for compute capability 9.0, which needs no GPU; one JSON object per kernel.

A program of its own: Triton's interpreter, which the tests beside it run in, is chosen once per process. The
interpreter accepts what the compiler refuses (a loop variable that changes its type, say).
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from wingbeat.kernels.attention.kernel import tree_attention_kernel
from wingbeat.kernels.attention.splits import merge_splits_kernel
from wingbeat.kernels.attention.tiles import TILE_CONFIGS, tile_config
from wingbeat.kernels.kv import triton as triton_kv_cache

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv"}


def compile_kernel(kernel, pointers: dict, constants: dict, scalars: dict | None = None, **options) -> None:
    """Compile with `pointers` of the given types (None: absent); other arguments are int32, strides multiples of 16."""
    signature, constexprs, attrs = {}, {}, {}
    unspecialized = {
        parameter.name
        for parameter in kernel.params
        if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
    }
    arguments = {**pointers, **(scalars or {})}
    for index, name in enumerate(kernel.arg_names):
        if name in constants or (name in arguments and arguments[name] is None):
            signature[name], constexprs[name] = "constexpr", constants.get(name)
            continue
        signature[name] = arguments.get(name, "i32")
        if name not in unspecialized and name not in (scalars or {}):
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    compiled = triton.compile(source, target=TARGET, options=options)
    ptx = compiled.asm["ptx"]
    result = {
        "kernel": kernel.__name__,
        "shared_bytes": compiled.metadata.shared,
        "wgmma": "wgmma.mma_async" in ptx,
        "copies_16_bytes": ptx.count("cp.async.cg.shared.global") + ptx.count("ld.global.v4.b32"),
        "barriers": ptx.count("bar.sync"),
    }
    print(json.dumps(result), flush=True)


def compile_attention(dtype, dims, config, *, causal=False, window=False, softcap=False, fp8=False, sinks=False):
    """One variant of the attention kernel, with a split context."""
    cache = TYPES[torch.float8_e4m3fn] if fp8 else TYPES[dtype]
    pointers = {
        "query_ptr": TYPES[dtype],
        "key_ptr": cache,
        "value_ptr": cache,
        "table_ptr": "*i64",
        "context_ptr": "*i64",
        "position_ptr": "*i64" if window and not causal else None,
        "words_ptr": None if causal else "*i64",
        "sink_ptr": TYPES[dtype] if sinks else None,
        "out_ptr": "*fp32",
        "lse_ptr": "*fp32",
    }
    constants = {
        "SPLIT": True,
        "GROUP": 4,
        "NUM_KV_HEADS": 8,
        "BLOCK_SIZE": 16,
        "KEY_DIM": dims[0],
        "VALUE_DIM": dims[1],
        "BLOCK_KEY_DIM": triton.next_power_of_2(dims[0]),
        "BLOCK_VALUE_DIM": triton.next_power_of_2(dims[1]),
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_KEYS": config.block_keys,
        "TAIL_KEYS": min(config.block_keys, 64),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
    scalars = {
        "logit_scale": "fp32",
        "softcap": "fp32" if softcap else None,
        "window": "i32" if window else None,
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    compile_kernel(tree_attention_kernel, pointers, constants, scalars, **options)


def main(stride: int) -> None:
    """The variants that Llama-3.1-8B meets; with a stride each option too, and each so-manieth tile configuration."""
    bf16 = torch.bfloat16
    tiles = TILE_CONFIGS[2, 128]
    compile_attention(bf16, (128, 128), tiles[-1])
    compile_attention(bf16, (128, 128), tiles[0], causal=True)
    merge = {"NUM_HEADS": 32, "VALUE_DIM": 128, "BLOCK_VALUE_DIM": 128, "ALL_SPLITS": 128, "BLOCK_SPLITS": 16}
    partial = {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16"}
    compile_kernel(merge_splits_kernel, partial, merge)
    names = ("key", "value", "key_cache", "value_cache")
    rows = {f"{name}_ptr": "*bf16" for name in names} | {"slot_ptr": "*i64"}
    store = {"BLOCK_SIZE": 16, "NUM_HEADS": 8, "KEY_DIM": 128, "VALUE_DIM": 128, "KEY_CHUNKS": 1, "CHUNK": 1024}
    compile_kernel(triton_kv_cache._store_kv_kernel, rows, store)
    moves = {"entry_ptr": "*i64", "from_ptr": "*i64", "to_ptr": "*i64"}
    words = {"WORD": triton.language.int64, "WORDS_16_BYTES": 2, "BLOCK_MOVES": 8, "CHUNK": 256}
    compile_kernel(triton_kv_cache._move_kv_kernel, moves, words | {"BLOCK_SIZE": 16})
    if not stride:
        return
    every = [(*shape, config) for shape, configs in TILE_CONFIGS.items() for config in configs]
    for itemsize, dim, config in every[::stride]:
        compile_attention(bf16 if itemsize == 2 else torch.float32, (dim, dim), config, causal=True, window=True)
    for dims in ((80, 80), (96, 96), (112, 112), (192, 128)):
        config = tile_config(torch.float16, max(dims), 128)
        compile_attention(torch.float16, dims, config, window=True, softcap=True, sinks=True)
    compile_attention(bf16, (128, 128), tiles[-1], fp8=True)
    compile_attention(bf16, (128, 128), tiles[0], fp8=True, causal=True)
    quantised = {"key_cache_ptr": "*fp8e4nv", "value_cache_ptr": "*fp8e4nv"}
    compile_kernel(triton_kv_cache._store_kv_kernel, rows | quantised, store)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 0)
