"""Logits, hidden states, taps and KV of every stage are the torch runner's."""

import pytest

from tests.runtime.models import prepare_model, random_model
from tests.runtime.tensorrt.engine_world import base_config, base_session
from tests.runtime.tensorrt.stage_parity import Both, kv_after_compaction, largest_differences

TOLERANCE = 2e-5
SMALL = {"initializer_range": 0.1}


@pytest.fixture(scope="module")
def llama():
    loaded = prepare_model(random_model("llama", **SMALL), "llama")
    config = base_config(loaded, (0, 2, 4))
    return loaded, base_session(loaded, config), config


@pytest.mark.parametrize("batch", [1, 4])
def test_every_stage_gives_what_torch_gives(llama, batch):
    differences = largest_differences(Both(*llama), batch)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.parametrize("name", ["mistral", "gemma2", "qwen3"])
@pytest.mark.few(1)
def test_windows_and_softcaps_are_right(name):
    loaded = prepare_model(random_model(name, **SMALL), name)
    config = base_config(loaded, (1, 2))
    differences = largest_differences(Both(loaded, base_session(loaded, config), config), 4)
    assert max(differences.values()) <= TOLERANCE, differences


def test_kv_after_compaction_is_that_of_a_fresh_prefill(llama):
    before, after = kv_after_compaction(Both(*llama), 4)
    assert before > 0.01
    assert after <= TOLERANCE
