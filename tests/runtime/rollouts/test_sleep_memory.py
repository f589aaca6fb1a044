"""Weights that move to memory which a sleep gives back: everything that uses them moves along."""

from types import SimpleNamespace

import torch
from torch import nn

from tests.runtime.models import engine_config, random_model
from tests.runtime.rollouts.host_driver import HostDriver
from wingbeat.runtime import pair
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.rollouts import sleep_memory, virtual_memory
from wingbeat.runtime.rollouts.served_weights import ServedWeights
from wingbeat.runtime.rollouts.sleep_memory import DeviceMemory, SleepingBackend, open_sleeping
from wingbeat.runtime.verifier.backend import Backend
from wingbeat.runtime.verifier.loading.loader import prepare_model

HOST = torch.device("cpu")


def test_every_weight_moves_with_all_that_uses_it(monkeypatch):
    monkeypatch.setattr(sleep_memory, "CHUNK_BYTES", 1 << 16)  # several pieces
    loaded = prepare_model(random_model("llama"), "llama")
    weights, driver = ServedWeights(loaded), HostDriver()
    expected = weights.checksums()
    backend = open_sleeping(loaded, driver)
    assert weights.checksums() == expected
    addresses = [one.untyped_storage().data_ptr() for one in weights.storages()]
    assert len(driver.reserved) > 2
    assert all(any(begin <= one < begin + size for begin, size in driver.reserved.items()) for one in addresses)
    memory = loaded.parts["sleep"]
    assert loaded.mapped_bytes == driver.physical_bytes >= sum(one.nbytes for one in weights.storages())

    config = engine_config(num_kv_blocks=32)
    _, cache = backend.parts(loaded, config, (), ())
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
    memory._take([sleep_memory._tensors_by_storage(HOST)[user._cdata]])
    assert "unknown users" in caplog.text
    assert {one.untyped_storage().data_ptr() for one in (module.weight, turned)} == {address}
    assert torch.equal(module.weight, before)
    assert torch.equal(turned, before.t())


def test_a_card_without_room_leaves_the_weights_in_torch_s_memory(caplog):
    loaded = prepare_model(random_model("llama"), "llama")
    expected = ServedWeights(loaded).checksums()
    assert type(open_sleeping(loaded, HostDriver(total_bytes=0))) is Backend
    assert "/sleep will be refused" in caplog.text
    assert (ServedWeights(loaded).checksums(), loaded.parts) == (expected, {})


def test_a_verifier_on_a_gpu_that_may_sleep_is_loaded_into_such_memory(monkeypatch):
    loaded = prepare_model(random_model("llama"), "llama")
    monkeypatch.setattr(pair, "load_verifier", lambda settings, device: loaded)
    monkeypatch.setattr(virtual_memory, "CudaDriver", HostDriver)
    settings = SimpleNamespace(engine=engine_config(frees_memory=True), engine_dir=None, spread=None)
    assert first_result("open_backend", settings, HOST) is None
    awake = SimpleNamespace(engine=engine_config(), engine_dir=None, spread=None)
    assert first_result("open_backend", awake, torch.device("cuda", 0)) is None
    opened, config, backend = first_result("open_backend", settings, torch.device("cuda", 0))
    assert (opened, config, type(backend)) == (loaded, settings.engine, SleepingBackend)
    assert loaded.mapped_bytes > 0
