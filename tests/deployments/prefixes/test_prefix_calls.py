"""From settings to an engine that keeps prefixes, and the calls about them that its replica makes."""

import asyncio

import pytest

from tests.deployments.engine_world import ThreadedEngine
from tests.fakes import FakeEngine
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.catalog import CatalogEntry
from wingbeat.deployments.replica.engine.build import build_setup
from wingbeat.deployments.replica.engine.engine_calls import EngineCalls
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix

PREFIX = SavedPrefix("system", 5, tuple(range(5, 45)))
ENTRY = CatalogEntry("system", 5, PREFIX)


def calls_of(model, **fields):
    config = AppConfig(model=model, drafter="none", max_model_len=128, num_kv_blocks=64, threads=1, **fields)
    setup = build_setup(config, lambda convention: DrafterNeeds())
    return setup, EngineCalls(setup, config, "engine")


def finish(setup):
    while setup.engine.has_unfinished_requests():
        for output in setup.engine.step():
            setup.keepers["prefixes"].take(output)


@pytest.mark.slow
def test_a_prefix_is_kept_from_one_engine_to_the_next(tiny_model, tmp_path):
    folder = tmp_path / "kept"
    setup, calls = calls_of(tiny_model, prefix_dir=folder)
    assert calls.open_names("prefixes", ()) == ()
    done = calls.operate("save_prefix", (PREFIX,))
    finish(setup)
    assert done.result(0) is None
    calls.keep_names("prefixes", (ENTRY,)).result(10)
    calls.close()
    setup, calls = calls_of(tiny_model, prefix_dir=folder)
    assert calls.open_names("prefixes", ()) == (ENTRY,)
    assert not setup.engine.has_unfinished_requests()
    (told,) = calls.operate("describe_prefixes", ())["prefixes"]
    assert (told["name"], told["blocks"], told["saved"]) == ("system", 2, str(folder / "system.safetensors"))
    assert calls.operate("stored_prefix", ("system",)) == PREFIX
    assert calls.operate("stored_prefix", ("other",)) is None
    calls.close()


@pytest.mark.slow
def test_weights_that_changed_are_told_from_those_before(tiny_model, tmp_path, caplog):
    for path in tiny_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    setup, calls = calls_of(tmp_path, prefix_dir=tmp_path / "kept")
    calls.keep_names("prefixes", (ENTRY,))
    finish(setup)
    calls.close()
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    setup, calls = calls_of(tmp_path, prefix_dir=tmp_path / "kept")
    calls.open_names("prefixes", ())
    assert "system.safetensors has another weights" in caplog.text
    assert calls.operate("describe_prefixes", ())["prefixes"] == []
    finish(setup)
    assert len(calls.operate("describe_prefixes", ())["prefixes"]) == 1
    calls.close()


def test_an_engine_that_keeps_none_says_so():
    async def scenario():
        one = ThreadedEngine(FakeEngine())
        try:
            refused = await one.client.call("operate", "save_prefix", (PREFIX,))
            assert refused == ("invalid_value", "cannot be kept: this engine keeps no prefixes")
            assert await one.client.call("open_names", "prefixes", ()) == ()
            assert (await one.client.call("operate", "describe_prefixes", ()))["prefixes"] == []
            assert await one.client.call("keep_names", "prefixes", ()) is None
            for name, arguments in (("drop_prefix", ("a", 1)), ("stored_prefix", ("a",))):
                assert await one.client.call("operate", name, arguments) is None
        finally:
            one.close()

    asyncio.run(scenario())


def test_settings_that_cannot_keep_prefixes_are_refused(tmp_path):
    (tmp_path / "file").touch()
    for fields, problem in (
        ({"prefix_dir": tmp_path / "file"}, "must be a directory"),
        ({"prefix_dir": tmp_path, "enable_prefix_caching": False}, "enable_prefix_caching is False"),
        ({"max_pinned_tokens": -1}, "max_pinned_tokens"),
        ({"max_pinned_tokens": 2**31}, "max_pinned_tokens is 2147483648: use at most 2147483647"),
    ):
        with pytest.raises(ValueError, match=problem):
            AppConfig(**fields)
    config = AppConfig(prefix_dir="none", max_pinned_tokens="none")
    assert (config.prefix_dir, config.max_pinned_tokens) == (None, None)
