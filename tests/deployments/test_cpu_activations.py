"""The setting `cpu_activations`."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.needs import needs
from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.cpu.activations.part import open_backend


def test_texts_of_rounded_activations_are_others():
    assert AppConfig(cpu_activations="int8").text_identity() != AppConfig().text_identity()
    assert AppConfig(cpu_activations="exact").text_identity() == AppConfig().text_identity()


def test_engines_are_told():
    config = AppConfig(cpu_activations="int8", max_model_len=256)
    assert config.engine_config().cpu_activations == "int8"


def test_a_gpu_rounds_none():
    with pytest.raises(ValueError, match=r"cpu_activations is int8 and .*: only the CPU's kernels .*; use device cpu"):
        AppConfig(cpu_activations="int8", num_gpus_per_verifier=1, num_gpus_per_drafter=1)


@needs("ranks")
def test_ranks_round_none():
    with pytest.raises(ValueError, match=r"cpu_activations is int8 and tensor_parallel_size is 2: .*; leave one out"):
        AppConfig(cpu_activations="int8", tensor_parallel_size=2, drafter="none")


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="cpu_activations"):
        AppConfig(cpu_activations="int4")


def test_an_llm_that_something_else_runs_is_refused():
    settings = SimpleNamespace(engine=EngineConfig(cpu_activations="int8"), engine_dir=Path("engines"))
    with pytest.raises(ValueError, match=r"cpu_activations is int8 and engine_dir is given: .*; use exact"):
        open_backend(settings, torch.device("cpu"))
    settings.engine_dir = None
    with pytest.raises(ValueError, match=r"cpu_activations is int8 and device is cuda: .*; use exact"):
        open_backend(settings, torch.device("cuda"))
    assert open_backend(settings, torch.device("cpu")) is None
