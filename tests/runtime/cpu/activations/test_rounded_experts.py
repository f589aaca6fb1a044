"""Rounded activations of experts whose weights are packed."""

import pytest
import torch

from tests.runtime.models import TREE, eagle_drafter, engine_config, generate, greedy_params, random_prompts
from tests.runtime.quantised.test_checkpoints import CASES, CPU, save_quantised
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.cpu.activations.part import extend_model
from wingbeat.runtime.verifier.loading.loader import load_model

NUM_TOKENS = 24


@pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
def test_experts_round_what_they_are_sent(tmp_path, caplog):
    save_quantised(tmp_path, *CASES["awq"], model="qwen3_moe")
    loaded = load_model(tmp_path, torch.float32, CPU)
    prompts, params = random_prompts((5, 23)), [greedy_params(NUM_TOKENS)] * 2
    before = loaded.model.model.layers[0].mlp.experts.panels
    with caplog.at_level("INFO"):
        extend_model(loaded, EngineConfig(cpu_activations="int8"))
    assert all(panels.matrices[0].groups.rounded for panels in before.all)
    assert f"and {len(list(before.all)) * len(loaded.layers)} of experts round" in caplog.text
    plain = generate(loaded, engine_config(TREE), None, prompts, params)[0]
    assert generate(loaded, engine_config(TREE), eagle_drafter(loaded, TREE), prompts, params)[0] == plain
