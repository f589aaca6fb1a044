"""Mapped tensors: zeros of every dtype a pool may have, whose pages take memory while the caller goes on."""

import platform
import resource

import pytest
import torch

from wingbeat.runtime.kv.host_pages import mapped_zeros, populate

MIB = 2**20
KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(7, 16, 1, 5), (3, 0)], ids=str)
def test_they_are_zeros_that_can_be_written_to(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = mapped_zeros(shape, dtype)
    assert (tensor.shape, tensor.dtype) == (shape, dtype)
    assert not tensor.float().any()
    tensor.copy_(torch.ones(shape))
    assert tensor.float().sum() == torch.ones(shape).sum()
    assert tensor.data_ptr() % 64 == 0


def test_what_was_written_meanwhile_stays():
    tensor = mapped_zeros((32 * MIB,), torch.uint8)
    thread = populate([tensor])
    tensor[::4096] = 1
    thread.join()
    assert tensor.sum() == 32 * MIB // 4096


@pytest.mark.skipif(KERNEL < (5, 14), reason="the kernel cannot populate pages")
def test_memory_is_taken_when_it_is_populated_and_not_before():
    before = resident()
    tensor = mapped_zeros((64 * MIB,), torch.uint8)
    assert resident() - before < 4 * MIB
    populate([tensor]).join()
    assert resident() - before > 60 * MIB


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
