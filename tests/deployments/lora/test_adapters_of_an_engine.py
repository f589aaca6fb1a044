"""From settings to an engine that serves adapters, and the calls that load others into it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.runtime.lora_world import num_resident
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.catalog import VARIANTS, CatalogEntry
from wingbeat.deployments.replica.engine.build import build_setup
from wingbeat.deployments.replica.engine.engine_calls import EngineCalls
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.scheduling.request import Request, SamplingParams

LINEAR = "base_model.model.model.layers.1.mlp.down_proj.lora_"


def write_adapter(folder: Path, inputs: int = 128, seed: int = 0) -> Path:
    """An adapter of the tiny model's second MLP."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(seed)
    tensors = {f"{LINEAR}A.weight": torch.randn(4, inputs, generator=draw)}
    tensors[f"{LINEAR}B.weight"] = torch.randn(64, 4, generator=draw)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    return folder


def setup_of(model: Path, **fields):
    config = AppConfig(model=model, drafter="none", max_model_len=128, num_kv_blocks=64, threads=1, **fields)
    return build_setup(config, lambda convention: DrafterNeeds()), config


def text(engine, variant=None) -> tuple[int, ...]:
    engine.add_request(Request("r", (5, 6, 7), SamplingParams(8, 0.0, ignore_eos=True), variant=variant))
    tokens = []
    while engine.has_unfinished_requests():
        tokens += [token for output in engine.step() for token in output.token_ids]
    return tuple(tokens)


def test_settings_and_calls_load_adapters_that_requests_run_with(tiny_model, tmp_path):
    listed, other = write_adapter(tmp_path / "listed"), write_adapter(tmp_path / "other", seed=1)
    setup, config = setup_of(tiny_model, lora_modules={"listed": listed}, lora_update_dir=tmp_path, max_loras=2)
    (adapter,) = setup.info.variants
    resident = setup.engine.loaded.parts["adapters"].resident
    assert (adapter.name, adapter.path) == ("listed", str(listed))
    assert num_resident(resident) == 1
    calls = EngineCalls(setup, config, "engine")
    loaded, problem = calls.operate("load_adapter", ("other", "other"))
    assert (problem, loaded[:2]) == ("", ("other", str(other)))
    assert num_resident(resident) == 2
    texts = {text(setup.engine), text(setup.engine, adapter), text(setup.engine, loaded)}
    assert len(texts) == 3
    assert calls.open_names(VARIANTS, (CatalogEntry("other", 1, loaded),)) == ()
    for entry, number in ((CatalogEntry("listed", 2, loaded), 1), (CatalogEntry("other", 3, None), 1)):
        calls.keep_names(VARIANTS, (entry,))
        assert num_resident(resident) == number
    calls.keep_names(VARIANTS, (CatalogEntry("listed", 4, None),))
    assert num_resident(resident) == 0


def test_an_adapter_of_another_model_ends_the_start_by_one_line(tiny_model, tmp_path):
    wrong = write_adapter(tmp_path / "wrong", inputs=96)
    with pytest.raises(ValueError, match=r"lora_A of model.layers.1.mlp.down_proj is \[4, 96\], not \[4, 128\]"):
        setup_of(tiny_model, lora_modules={"wrong": wrong})


def test_an_engine_without_the_setting_loads_none(tiny_model, tmp_path):
    setup, config = setup_of(tiny_model)
    loaded, problem = EngineCalls(setup, config, "engine").operate("load_adapter", ("a", str(tmp_path)))
    assert loaded is None
    assert "lora_update_dir" in problem
