"""Compile variants of the attention and KV kernels for a compute capability, without a GPU; one JSON object each.

A program of its own, `compile_attention.py CAPABILITY few|every`: Triton's interpreter, which the tests beside it run
in, is chosen once per process. The interpreter accepts what the compiler refuses (a loop variable that changes its
type, say).
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.gpu.resources import report
from wingbeat.kernels.gpu import kv as triton_kv_cache
from wingbeat.kernels.gpu.attention.device import KNOWN, DeviceLimits
from wingbeat.kernels.gpu.attention.kernel import tree_attention_kernel
from wingbeat.kernels.gpu.attention.splits import merge_splits_kernel
from wingbeat.kernels.gpu.attention.tiles import TileConfig, device_tiles, fixed_tile, tile_config

TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv"}
BF16 = torch.bfloat16


class Compiler:
    """Compiles kernels for one compute capability."""

    def __init__(self, limits: DeviceLimits) -> None:
        self.limits = limits
        self.has_fp8 = limits.capability >= 89

    def compile(self, name: str, kernel, pointers: dict, constants: dict, scalars: dict | None = None, **options):
        """Compile with `pointers` of the given types (None: absent); other arguments are int32, strides multiples of
        16. Prints what it takes."""
        signature, constexprs, attrs = {}, {}, {}
        unspecialized = {
            parameter.name
            for parameter in kernel.params
            if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        }
        arguments = {**pointers, **(scalars or {})}
        constants = constants | {"EARLY": self.limits.capability >= 90}
        for index, argument in enumerate(kernel.arg_names):
            if argument in constants or (argument in arguments and arguments[argument] is None):
                signature[argument], constexprs[argument] = "constexpr", constants.get(argument)
                continue
            signature[argument] = arguments.get(argument, "i32")
            if argument not in unspecialized and argument not in (scalars or {}):
                attrs[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
        target = GPUTarget("cuda", self.limits.capability, 32)
        report(name, triton.compile(source, target=target, options=options))

    def attention(
        self,
        dtype: torch.dtype,
        dims: tuple[int, int],
        config: TileConfig,
        *,
        causal: bool = False,
        window: bool = False,
        softcap: bool = False,
        fp8: bool = False,
        sinks: bool = False,
        split: bool = True,
        alike: bool = False,
    ) -> None:
        """Compile a variant of the attention kernel; keys of more than 512 elements contain their values."""
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
            "out_ptr": TYPES[dtype],
            "partial_ptr": "*fp32" if split else None,
            "lse_ptr": "*fp32" if split else None,
        }
        rest = dims[0] - dims[1] if dims[0] > 512 else 0
        constants = {
            "SPLIT": split,
            "GROUP": 128 if rest else 4,
            "NUM_KV_HEADS": 1 if rest else 8,
            "BLOCK_SIZE": 16,
            "KEY_DIM": dims[0] - rest,
            "VALUE_DIM": dims[1],
            "BLOCK_KEY_DIM": triton.next_power_of_2(dims[0] - rest),
            "BLOCK_VALUE_DIM": triton.next_power_of_2(dims[1]),
            "REST_DIM": rest,
            "BLOCK_REST_DIM": max(16, triton.next_power_of_2(rest)),
            "BLOCK_ROWS": config.block_rows,
            "BLOCK_KEYS": config.block_keys,
            "TAIL_KEYS": min(config.block_keys, 64),
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "ALIKE": alike,
        }
        scalars = {
            "logit_scale": "fp32",
            "softcap": "fp32" if softcap else None,
            "window": "i32" if window else None,
        }
        given = {
            "causal": causal,
            "window": window,
            "softcap": softcap,
            "fp8 cache": fp8,
            "sinks": sinks,
            "alike": alike,
        }
        words = [str(dtype).removeprefix("torch."), f"dim {max(dims)}", f"{config.block_rows} rows"]
        words += [word for word, used in given.items() if used] + ([] if split else ["whole"])
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        self.compile(", ".join(words), tree_attention_kernel, pointers, constants, scalars, **options)

    def others(self) -> None:
        """The merge of splits, and the kernels that store and move KV."""
        merge = {"NUM_HEADS": 32, "VALUE_DIM": 128, "BLOCK_VALUE_DIM": 128, "ALL_SPLITS": 128, "BLOCK_SPLITS": 4}
        partial = {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16", "context_ptr": "*i64"}
        for window in (None, "i32"):
            constants = merge | {"BLOCK_KEYS": 64}
            self.compile("", merge_splits_kernel, partial, constants, {"window": window}, num_warps=1)
        names = ("key", "value", "key_cache", "value_cache")
        rows = {f"{name}_ptr": "*bf16" for name in names} | {"slot_ptr": "*i64"}
        store = {"BLOCK_SIZE": 16, "NUM_HEADS": 8, "KEY_DIM": 128, "VALUE_DIM": 128, "KEY_CHUNKS": 1, "CHUNK": 1024}
        self.compile("", triton_kv_cache._store_kv_kernel, rows, store)
        if self.has_fp8:
            quantised = {"key_cache_ptr": "*fp8e4nv", "value_cache_ptr": "*fp8e4nv"}
            self.compile("fp8 cache", triton_kv_cache._store_kv_kernel, rows | quantised, store)
        moves = {"entry_ptr": "*i64", "from_ptr": "*i64", "to_ptr": "*i64"}
        words = {"WORD": triton.language.int64, "WORDS_16_BYTES": 2, "BLOCK_MOVES": 8, "CHUNK": 256}
        self.compile("", triton_kv_cache._move_kv_kernel, moves, words | {"BLOCK_SIZE": 16})

    def few(self) -> None:
        """Compile the variants of a model like Llama-3.1-8B, and the largest head dim in its tallest tile."""
        tiles = device_tiles(BF16, 128, self.limits)
        self.attention(BF16, (128, 128), tiles[0], causal=True)
        self.attention(BF16, (128, 128), tiles[-1])
        self.attention(BF16, (256, 256), device_tiles(BF16, 256, self.limits)[-1])

    def every(self) -> None:
        """Each tile with the masks and caches that take most; odd head dims with all that a model may ask for."""
        for dtype in (BF16, torch.float32):
            for dim in (64, 128, 256):
                for config in device_tiles(dtype, dim, self.limits):
                    self._tile(dtype, (dim, dim), config)
            for config in device_tiles(dtype, 576, self.limits):
                self._tile(dtype, (576, 512), config)
        for dim in (64, 128, 256):
            for window in (False, True):
                self.attention(BF16, (dim, dim), fixed_tile(BF16, dim, self.limits), window=window, alike=True)
        half, rows = torch.float16, 128 if self.limits.has_warpgroups else 64
        for dims in ((80, 80), (112, 112), (192, 128), (256, 256)):
            self.attention(half, dims, tile_config(half, max(dims), rows, self.limits))
        self.attention(BF16, (128, 128), device_tiles(BF16, 128, self.limits)[0], split=False)
        self.others()

    def _tile(self, dtype: torch.dtype, dims: tuple[int, int], config: TileConfig) -> None:
        self.attention(dtype, dims, config)
        self.attention(dtype, dims, config, causal=True)
        self.attention(dtype, dims, config, window=True, softcap=True, sinks=True)
        if dtype == BF16 and self.has_fp8:
            self.attention(dtype, dims, config, fp8=True)


if __name__ == "__main__":
    capability, extent = int(sys.argv[1]), sys.argv[2]
    compiler = Compiler(next(limits for limits in KNOWN.values() if limits.capability == capability))
    compiler.few() if extent == "few" else compiler.every()
