"""Weights that move to memory which a sleep gives back: everything that uses them moves along."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.runtime.models import engine_config, random_model
from tests.runtime.rollouts.host_driver import HostDriver
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.parts import hooks
from wingbeat.runtime.rollouts import device_memory, virtual_memory
from wingbeat.runtime.rollouts.device_memory import DeviceMemory
from wingbeat.runtime.rollouts.served_weights import ServedWeights
from wingbeat.runtime.verifier.backend import TORCH
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import prepare_model

HOST = torch.device("cpu")


def test_every_weight_moves_with_all_that_uses_it(monkeypatch):
    monkeypatch.setattr(device_memory, "CHUNK_BYTES", 1 << 16)  # several pieces
    loaded = prepare_model(random_model("llama"), "llama")
    weights, driver = ServedWeights(loaded), HostDriver()
    expected = weights.checksums()
    device_memory.move(loaded, driver=driver)
    assert weights.checksums() == expected
    addresses = [one.untyped_storage().data_ptr() for one in weights.storages()]
    assert len(driver.reserved) > 2
    assert all(any(begin <= one < begin + size for begin, size in driver.reserved.items()) for one in addresses)
    memory = loaded.parts["sleep"]
    assert loaded.mapped_bytes == driver.physical_bytes >= sum(one.nbytes for one in weights.storages())

    config = engine_config(num_kv_blocks=32)
    _, cache = TORCH.parts(loaded, config, (), ())
    plain = KVCache(loaded.layers, config, loaded.dtype, HOST)
    assert [[one.shape for one in pair] for pair in cache.layers] == [
        [one.shape for one in pair] for pair in plain.layers
    ]
    assert not any(one.any() for pair in cache.layers for one in pair)
    memory.free(1)
    assert (driver.physical_bytes, all(map(driver.is_missing, addresses))) == (0, True)
    memory.restore("weights")
    assert weights.checksums() == expected


def test_a_weight_that_is_used_by_more_than_tensors_stays_where_it_is(caplog):
    """Such a user would miss later updates."""
    module = nn.Linear(4, 4, bias=False).requires_grad_(False)
    before = module.weight.detach().clone()
    turned, user = module.weight.t(), module.weight.untyped_storage()
    address = user.data_ptr()
    memory = DeviceMemory(HOST, HostDriver())
    memory._take([device_memory._tensors_by_storage(HOST)[user._cdata]])
    assert "unknown users" in caplog.text
    assert {one.untyped_storage().data_ptr() for one in (module.weight, turned)} == {address}
    assert torch.equal(module.weight, before)
    assert torch.equal(turned, before.t())


def test_a_card_without_room_leaves_the_weights_in_torch_s_memory(caplog):
    loaded = prepare_model(random_model("llama"), "llama")
    expected = ServedWeights(loaded).checksums()
    device_memory.move(loaded, driver=HostDriver(total_bytes=0))
    assert "/sleep will be refused" in caplog.text
    assert (ServedWeights(loaded).checksums(), loaded.parts, loaded.pool_memory) == (expected, {}, None)


@pytest.mark.parametrize("problem", [None, "rank 1: cuMemCreate failed"])
def test_weights_stay_in_torch_s_memory_where_another_rank_has_no_room(problem: str | None):
    loaded = prepare_model(random_model("llama"), "llama")
    ranks = SimpleNamespace(agree=lambda own: problem)
    device_memory.move(loaded, ranks, HostDriver())
    assert ("sleep" in loaded.parts) == (loaded.pool_memory is not None) == (problem is None)


def test_a_verifier_on_a_gpu_that_may_sleep_is_moved_into_such_memory(monkeypatch):
    loaded = prepare_model(random_model("llama"), "llama")
    [extend] = [hook for hook in hooks("extend_model") if "rollouts" in hook.__module__]
    extend(loaded, engine_config(frees_memory=True))
    assert loaded.parts.keys() == {"rows"}
    monkeypatch.setattr(virtual_memory, "CudaDriver", HostDriver)
    monkeypatch.setattr(LoadedModel, "device", property(lambda loaded: SimpleNamespace(type="cuda")))
    moved = []
    monkeypatch.setattr(device_memory, "move", lambda loaded, ranks: moved.append((loaded, ranks)))
    extend(loaded, engine_config())
    assert moved == []
    extend(loaded, engine_config(frees_memory=True))
    assert moved == [(loaded, None)]


def test_a_pool_that_is_made_anew_takes_the_place_of_the_one_before():
    """A rank has several pools one after the other."""
    driver = HostDriver()
    memory = DeviceMemory(HOST, driver)
    for _ in range(3):
        [one] = memory.pool([(1 << 16,)], torch.float32, HOST)
        one.fill_(7)
        assert memory.mapped_bytes == driver.physical_bytes == 1 << 18


def test_a_cancelled_change_leaves_memory_as_it_was():
    driver = HostDriver()
    memory = DeviceMemory(HOST, driver)
    [kv] = memory.pool([(64,)], torch.float32, HOST)
    [weights] = memory._regions["weights"].allocate([100])
    weights.fill_(3)
    kv.fill_(5)
    memory.prepare("sleep", 1)
    memory.cancel("sleep", 1)
    assert (weights.unique().tolist(), kv.unique().tolist()) == ([3], [5])
    memory.free(1)
    memory.prepare("wake", "weights")
    assert driver.physical_bytes > 0
    memory.cancel("wake", "weights")
    assert driver.physical_bytes == 0
    memory.restore("weights")
    memory.prepare("wake", "weights")  # awake already
    memory.cancel("wake", "weights")
    assert weights.unique().tolist() == [3]
