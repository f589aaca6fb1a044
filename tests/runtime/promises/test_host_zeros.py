"""Mapped tensors: zeros of every dtype a pool may have, whose pages take memory as they are used."""

import gc
import resource
from pathlib import Path

import pytest
import torch

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.drafters.draft_pool import grown
from wingbeat.runtime.kv.pool import KVCache, LayerAttention
from wingbeat.runtime.promises import host_zeros
from wingbeat.runtime.promises.host_zeros import mapped_zeros
from wingbeat.runtime.promises.memory_promises import MemoryPromises

MIB = 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(7, 16, 1, 5), (3, 0)], ids=str)
def test_they_are_zeros_that_can_be_written_to(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = mapped_zeros(shape, dtype)
    assert (tensor.shape, tensor.dtype) == (shape, dtype)
    assert not tensor.float().any()
    tensor.copy_(torch.ones(shape))
    assert tensor.float().sum() == torch.ones(shape).sum()
    assert tensor.data_ptr() % 64 == 0


def test_an_idle_pool_takes_no_memory_and_is_promised_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    promises = MemoryPromises(tmp_path)  # promises of this test alone: other processes' come and go
    monkeypatch.setattr(host_zeros, "PROMISES", promises)
    gc.collect()  # No pool of an earlier test ends meanwhile.
    before = resident()
    config = EngineConfig(num_kv_blocks=1024, max_model_len=64, max_num_seqs=2)
    cache = KVCache([LayerAttention(2, 2, 256, 256, None)], config, torch.float32, torch.device("cpu"))
    assert resident() - before < 4 * MIB
    assert promises.untouched() == 1024 * cache.block_bytes == 64 * MIB
    cache.layers[0][0].fill_(1.0)
    assert resident() - before > 30 * MIB
    assert promises.untouched() == 32 * MIB
    del cache
    gc.collect()
    assert promises.untouched() == 0


def test_an_idle_draft_pool_takes_no_memory():
    gc.collect()
    before = resident()
    held = grown(torch.zeros(0), (4096, 16, 2, 128), torch.float32, torch.device("cpu"))
    assert held.nbytes == 64 * MIB
    assert resident() - before < 4 * MIB
    held[:4] = 1
    larger = grown(held, (8192, 16, 2, 128), torch.float32, torch.device("cpu"))
    assert torch.equal(larger[:4], held[:4])
    assert not larger[4:8].any()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
