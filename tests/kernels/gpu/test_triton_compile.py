"""The kernels compile for the GPUs they are written for, and fit into them; no GPU is needed for that."""

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import KernelInterface

from tests.kernels.attention_cases import NAN, Case, build
from tests.kernels.gpu.compile_launches import launch_all
from tests.kernels.gpu.resources import CAPABILITIES, Resources, compiled, every
from tests.optional import is_gone
from wingbeat.kernels.gpu import kv
from wingbeat.kernels.gpu.attention.device import KNOWN, DeviceLimits
from wingbeat.kernels.gpu.attention.launch import tree_attention
from wingbeat.kernels.gpu.attention.splits import Splits
from wingbeat.kernels.gpu.attention.tiles import device_tiles

KERNELS = {
    "tree_attention", "merge_splits", "store_kv", "move_kv", "add_rms_norm", "rotate_and_store", "silu_mul", "shrink",
    "expand", "noise", "count", "scale", "pass", "edge", "filter", "candidates",
    "level", "finalize", "walk", "ancestors", "paths", "rotations", "slot_mapping", "best", "check", "place", "settle",
    "delta_rule", "packed_product", "unpack", "grouped_product", "embed_beside", "few_rows_product", "alike_product",
    "embed_to_heads", "gated_norm", "selective_scan", "convolve", "advance_recurrence", "advance_convolution",
    "channel_scan", "advance_channels", "choose_experts", "route_experts", "sum_experts",
    "store_latents", "keep_latents", "norm_parts",
}  # fmt: skip
# CUDA C++ Programming Guide, "technical specifications per compute capability": 163, 99 and 227 KiB.
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
SPILLED_BYTES = {
    "tree_attention": 160, "scale": 8, "edge": 32, "delta_rule": 104, "packed_product": 16, "alike_product": 16,
}  # fmt: skip
"""Most bytes that a kernel may spill per thread; 0 for kernels not named. 160 bytes x 256 threads are 40 KiB of the L1
cache; tiles of half the height would read each tile of keys twice. Most spills belong to the stores after all tiles,
which go to one of two places. The delta rule and packed products spill that much on 12.0 under Triton 3.9 and less
elsewhere; batch-invariant float32 products do so on 8.6. The search for the edges of top-k and top-p spills 32
bytes on 9.0."""
_GEMMA_2 = "bfloat16, dim 256, 64 rows, window, softcap, sinks"
_GEMMA_2_SPILLED_BYTES = 200
"""Most bytes that this variant may spill per thread; with 128 threads, 25 KiB."""


def limits_of(capability: int) -> DeviceLimits:
    """Limits of a known GPU of that capability."""
    return next(limits for limits in KNOWN.values() if limits.capability == capability)


def check(one: Resources, capability: int) -> None:
    """Check that a variant fits, with no more shared memory than the table of tiles states."""
    what = f"{one.kernel} {one.variant} on {capability}"
    assert one.shared_bytes <= SHARED_BYTES[capability], f"{what} takes {one.shared_bytes} bytes"
    allowed = _GEMMA_2_SPILLED_BYTES if one.variant == _GEMMA_2 else SPILLED_BYTES.get(one.kernel, 0)
    assert one.spilled_bytes <= allowed, f"{what} spills {one.spilled_bytes} bytes"
    assert one.registers * one.num_warps * 32 <= 65536
    if one.kernel == "tree_attention":
        dtype, dim, height = one.variant.split(", ")[:3]
        tiles = device_tiles(getattr(torch, dtype), int(dim.split()[1]), limits_of(capability))
        (tile,) = (tile for tile in tiles if tile.block_rows == int(height.split()[0]))
        assert one.shared_bytes <= tile.shared_bytes, f"{what} takes {one.shared_bytes} bytes"


def test_gpus_have_the_memory_that_cuda_gives_them():
    assert {limits.capability: limits.shared_bytes for limits in KNOWN.values()} == SHARED_BYTES


def test_every_launch_states_whether_multiply_and_add_are_fused(monkeypatch):
    """Versions of Triton differ in what they do by default, so bits and speed would depend on the version."""
    stated: dict[str, list[bool]] = {}

    def launcher(kernel, grid):
        name = kernel.__name__.strip("_").removesuffix("_kernel")
        return lambda *args, **given: stated.setdefault(name, []).append("enable_fp_fusion" in given)

    monkeypatch.setattr(KernelInterface, "__getitem__", launcher)
    launch_all()
    inputs = build(Case((3,)), NAN)
    for splits in (Splits(1, 32), Splits(4, 1)):
        tree_attention(*inputs.arguments, **inputs.options, splits=splits)
    _, key_cache, value_cache, *_ = inputs.arguments
    slots = torch.tensor([5])
    kv.store_kv(key_cache[1, :1], value_cache[1, :1], key_cache, value_cache, slots)
    kv.move_kv([(key_cache, value_cache)], slots, slots + 1)
    assert stated.keys() == {name for name in KERNELS if not is_gone(name)}
    assert [name for name, ways in stated.items() if not all(ways)] == []


@pytest.mark.slow
def test_attention_fits_into_the_smallest_gpus():
    """In the compiler's own cache: it costs its seconds once."""
    results = compiled("compile_attention.py", "86", "few")
    assert len(results) == 3
    for one in results:
        check(one, 86)
        assert one.instructions["copies of 16 bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_fits(capability):
    results = every(capability)
    assert {one.kernel for one in results} == {name for name in KERNELS if not is_gone(name)}
    for one in results:
        check(one, capability)
        # Several programs of all but attention, and of tall products, share a multiprocessor.
        share = limits_of(capability).sm_shared_bytes // 2 - 1024
        assert one.kernel in ("tree_attention", "alike_product") or one.shared_bytes <= share
        # Only code behind the wait for the earlier launch may read that launch's writes.
        assert one.instructions["looks before its wait"] == (capability < 90), one.kernel
    alike = [one for one in results if "alike" in one.variant]
    assert len(alike) == 6
    assert all(one.instructions["copies of 16 bytes"] for one in alike), "no keys are fetched ahead"
    (moving,) = (one for one in results if one.kernel == "move_kv")
    assert moving.instructions["barriers"] > 0, "nothing orders a program's reads before its writes"
    if limits_of(capability).has_warpgroups:
        tall = [one for one in results if one.variant.startswith(("bfloat16, dim 128, 64", "bfloat16, dim 128, 128"))]
        assert all(one.instructions["warpgroup products"] for one in tall if "fp8 cache" not in one.variant)
