"""Memory that is given back and taken again at the same addresses."""

import pytest
import torch

from tests.runtime.rollouts.host_driver import HostDriver
from wingbeat.kernels.cuda_driver import CudaError
from wingbeat.runtime.rollouts import virtual_memory
from wingbeat.runtime.rollouts.virtual_memory import ALIGNMENT_BYTES, Region

HOST = torch.device("cpu")


def sleep(region: Region, saves: bool) -> None:
    if saves:
        region.save()
    else:
        region.forget()
    region.unmap()


def wake(region: Region) -> None:
    region.map()
    region.fill()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    monkeypatch.setattr(virtual_memory, "HOST_BLOCK_BYTES", 1 << 15)  # several blocks in a piece
    return HostDriver()


def test_contents_come_back_to_the_same_addresses_in_other_memory(driver: HostDriver):
    region = Region(HOST, driver)
    tensors = [*region.allocate([100_000, 7]), *region.allocate([3])]
    for seed, one in enumerate(tensors):
        one.copy_(torch.randint(256, one.shape, generator=torch.Generator().manual_seed(seed)))
    expected, addresses = [one.clone() for one in tensors], [one.data_ptr() for one in tensors]
    assert all(address % ALIGNMENT_BYTES == 0 for address in addresses)
    assert driver.physical_bytes == region.num_bytes == 3 * HostDriver.GRANULARITY
    sleep(region, saves=True)
    assert driver.physical_bytes == 0
    assert all(map(driver.is_missing, addresses))
    sleep(region, saves=True)  # once more, which changes nothing
    del driver.calls[:]
    wake(region)
    assert driver.calls == ["create", "map"] * 2
    assert [one.data_ptr() for one in tensors] == addresses
    assert all(map(torch.equal, tensors, expected))
    wake(region)
    assert driver.calls == ["create", "map"] * 2


@pytest.mark.parametrize("levels", [[False], [True, False]])
def test_memory_without_saved_contents_is_zero(driver: HostDriver, levels: list[bool]):
    region = Region(HOST, driver)
    [one] = region.allocate([100_000])
    one.fill_(7)
    for saves in levels:
        sleep(region, saves)
    wake(region)
    assert not one.any()


def test_a_card_that_others_have_filled_leaves_the_region_asleep_with_its_contents(driver: HostDriver):
    region = Region(HOST, driver)
    first, second = region.allocate([10])[0].fill_(1), region.allocate([10])[0].fill_(2)
    sleep(region, saves=True)
    driver.total_bytes = HostDriver.GRANULARITY
    with pytest.raises(CudaError, match="cuMemCreate failed: out of memory"):
        wake(region)
    assert (driver.physical_bytes, region.is_asleep) == (0, True)
    driver.total_bytes *= 2
    wake(region)
    assert (first.unique().tolist(), second.unique().tolist()) == ([1], [2])


def test_a_host_without_room_leaves_the_region_awake(driver: HostDriver, monkeypatch: pytest.MonkeyPatch):
    region = Region(HOST, driver)
    [one] = region.allocate([100_000])
    one.fill_(7)
    made = iter([torch.empty(1 << 15, dtype=torch.uint8)])

    def empty(*args, **options):
        if (block := next(made, None)) is None:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return block

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(MemoryError, match=r"^CUDA error: out of memory$"):
        sleep(region, saves=True)
    assert not region.is_asleep
    assert one.unique().tolist() == [7]
    sleep(region, saves=False)
    monkeypatch.undo()
    wake(region)
    assert not one.any(), "and no part of what was saved"


def test_a_machine_without_the_driver_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(CudaError, match="the driver's library cannot be opened: libcuda"):
        Region(torch.device("cuda", 0)).allocate([1])
