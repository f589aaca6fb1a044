"""Heads of eight bits on a GPU of shapes alone: packed, half of the bytes, swapped for others like any head."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from tests.runtime.fake_gpu import fake_gpu, why_not
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.gpu_world import CHAIN, eagle_head
from tests.runtime.launch_counts import attach
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.fp8_heads.fp8_weights import use_fp8
from wingbeat.runtime.head_swaps.head_swaps import NextHead, take_head, tensors_of
from wingbeat.runtime.packed import modules
from wingbeat.runtime.packed.modules import PackedLinear


def num_bytes(head: nn.Module) -> int:
    """Bytes of a head's weights and buffers."""
    return sum(part.numel() * part.element_size() for part in tensors_of(head).values())


def test_a_head_is_packed_and_swapped(monkeypatch):
    monkeypatch.setattr(modules, "DEVICES", {"cuda"})
    if (reason := why_not()) is not None:
        pytest.skip(f"no fake GPU: {reason}")
    with fake_gpu() as gpu:
        head, other = eagle_head("eagle-3"), eagle_head("eagle-3")
        before = num_bytes(head)
        for each in (head, other):
            use_fp8(each)
        linears = [one for one in head.modules() if isinstance(one, nn.Linear)]
        assert linears
        assert all(isinstance(one, PackedLinear) for one in linears)
        weights = sum(2 * one.weight.numel() for one in linears)
        assert num_bytes(head) == before - weights // 2 + 4 * sum(one.out_features for one in linears)
        drafter = EagleDrafter(head, CHAIN, FakeGraphDevice(gpu))
        attach(drafter, CHAIN, num_slots=1)
        gpu.launches.clear()
        with torch.inference_mode():
            take_head(drafter, NextHead(other, None))
        # Values and scales of each product, and what else a head has.
        assert gpu.launches["copy_"] == len(tensors_of(other))
        assert sum(".packed." in name for name in tensors_of(other)) == 2 * len(linears)
