"""Memory that an engine reserves for recurrent states, and settings that are refused with such models."""

import pytest

from tests.runtime.hybrids import hybrid, needs_states
from tests.runtime.models import CHAIN, engine_config
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine.memory import fit_to_memory
from wingbeat.runtime.kv.pool import block_bytes
from wingbeat.runtime.state.model_states import SHARE_OF_SAVED
from wingbeat.runtime.state.pool import row_bytes

pytestmark = needs_states


@pytest.fixture(scope="module")
def loaded():
    return hybrid("lfm2").loaded


def settled(loaded, budget, **fields):
    limits = {"num_kv_blocks": None, "kv_cache_memory_bytes": budget, "state_interval": 16, "max_model_len": 128}
    return fit_to_memory(loaded, engine_config(CHAIN, **(limits | fields)), DrafterNeeds())


def test_states_and_blocks_share_the_memory(loaded):
    state, block = row_bytes(loaded.parts["states"].states), block_bytes(loaded.layers, 16, loaded.dtype)
    budget = 9 * state + 16 * state + 100 * block
    config = settled(loaded, budget)
    left = budget - 9 * state
    assert config.num_saved_states == int(SHARE_OF_SAVED * left) // state
    assert config.num_kv_blocks == (left - config.num_saved_states * state) // block


def test_no_more_states_are_kept_than_blocks_can_tell_apart(loaded):
    assert settled(loaded, 0, num_kv_blocks=100).num_saved_states == 100
    assert settled(loaded, 0, num_kv_blocks=100, state_interval=64).num_saved_states == 25
    assert settled(loaded, 0, num_kv_blocks=100, enable_prefix_caching=False).num_saved_states == 1
    assert settled(loaded, 0, num_kv_blocks=100, num_saved_states=7).num_saved_states == 7


def test_the_interval_is_whole_blocks(loaded):
    assert settled(loaded, 0, num_kv_blocks=100, state_interval=20).state_interval == 32


def test_memory_for_states_alone_is_no_memory(loaded):
    with pytest.raises(ValueError, match="kv_cache_memory_bytes"):
        settled(loaded, 9 * row_bytes(loaded.parts["states"].states))
