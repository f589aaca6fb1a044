"""LoRA adapters over an engine: what each sequence of a mixed batch writes is what its merged model writes."""

import pytest

from tests.runtime.lora_world import KINDS, NUM_TOKENS, lora_world, num_resident
from tests.runtime.models import CHAIN, TREE, engine_config, greedy_params, reference
from tests.runtime.tensorrt.captured import captured_pair
from tests.runtime.tensorrt.engine_world import LIMITS, base_config, base_session, torch_pair
from tests.runtime.tensorrt.exported import exported_pair
from tests.runtime.tensorrt.test_engine_captured import ALL
from tests.runtime.tensorrt.test_export import engine_by_onnx_runtime
from wingbeat.runtime.lora.adapter import AdapterError
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.tensorrt.backend import engine_limits
from wingbeat.runtime.tensorrt.lora.engine_adapters import IDS

BUILT = LIMITS.model_copy(update={"max_loras": 4, "max_lora_rank": 8})
SHAPES = {"plain": None, "chain": CHAIN, "tree": TREE}


def engine_with(speculation, max_loras=4, max_lora_rank=8, built=BUILT, batch=4):
    limits = engine_config(
        speculation or TREE,
        max_num_seqs=batch,
        num_kv_blocks=None,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
    )
    return torch_pair(reference("llama").loaded, speculation or TREE, limits, speculation is not None, built=built)


def texts(engine, which):
    """Tokens by prompt; prompt i has the adapter `which[i]` of the world, 0 is none."""
    world, tokens = lora_world(), {}
    for index, adapter in enumerate(which):
        params = greedy_params(NUM_TOKENS)
        engine.add_request(Request(str(index), tuple(world.prompts[index]), params, variant=world.adapters[adapter]))
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.failure is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    engine.check_integrity()
    return [tokens[str(index)] for index in range(len(which))]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_adapters_write_what_each_merged_model_writes(shape):
    world = lora_world()
    which = [index % len(world.adapters) for index in range(len(world.prompts))]
    engine, session, _ = engine_with(SHAPES[shape])
    expected = [world.expected[adapter][index] for index, adapter in enumerate(which)]
    assert texts(engine, which) == expected
    assert IDS in session.inputs


@pytest.mark.slow
def test_more_adapters_than_places_take_turns_and_leave_nothing_behind():
    world, count = lora_world(), len(KINDS)
    engine, _, _ = engine_with(None, max_loras=1)
    order = [1 + index % count for index in range(len(world.prompts))]
    assert texts(engine, order) == [world.expected[adapter][index] for index, adapter in enumerate(order)]
    # The base model is what it was: the last adapter lies there still, and no row chooses it.
    assert texts(engine, [0] * 4) == [world.expected[0][index] for index in range(4)]
    assert num_resident(engine.loaded.parts["adapters"].resident) == 1


def test_an_engine_with_room_serves_without_adapters_too():
    world = lora_world()
    engine, _, _ = engine_with(None, max_loras=0)
    assert engine.loaded.seats is None
    assert texts(engine, [0, 0]) == world.expected[0][:2]


def test_an_adapter_of_a_higher_rank_is_refused_by_name():
    engine, _, _ = engine_with(None, max_lora_rank=2)
    adapter = lora_world().adapters[1]
    with pytest.raises(AdapterError, match="has rank 4, max_lora_rank is 2"):
        engine.loaded.parts["adapters"].inspect("wide", lora_world().folders[1])
    engine.add_request(Request("0", (1, 2, 3), greedy_params(4), variant=adapter))
    [failed] = [output for output in (engine.step() or engine.step()) if output.failure]
    assert failed.request_id == "0"


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"max_loras": 5, "max_lora_rank": 8}, "max_loras is 5: the engine was built with max_loras 4"),
        ({"max_loras": 2, "max_lora_rank": 9}, "max_lora_rank is 9: the engine was built with max_lora_rank 8"),
    ],
)
def test_more_than_the_engine_was_built_for_is_refused(asked, problem):
    config = base_config(reference("llama").loaded, (), BUILT)
    with pytest.raises(ValueError, match=problem):
        engine_limits(engine_config(TREE, num_kv_blocks=None, **asked), config)


def test_an_engine_without_room_has_no_inputs_for_adapters_and_refuses_them():
    loaded = reference("llama").loaded
    config = base_config(loaded, ())
    assert not [name for name in base_session(loaded, config).inputs if name.startswith("lora")]
    with pytest.raises(ValueError, match="max_loras is 1: the engine was built with max_loras 0"):
        engine_limits(engine_config(TREE, num_kv_blocks=None, max_loras=1), config)


@pytest.mark.slow
def test_adapters_that_come_after_the_capture_write_what_their_merged_models_write():
    world = lora_world()
    built = LIMITS.model_copy(update={"max_loras": 2, "max_lora_rank": 8})
    pair = captured_pair(reference("llama").loaded, built=built, max_num_seqs=3, max_loras=2, max_lora_rank=8)
    which = (1, 0, 2, 3, 1, 0)
    for index, adapter in enumerate(which):
        params, prompt = greedy_params(NUM_TOKENS), tuple(world.prompts[index])
        pair.engine.add_request(Request(str(index), prompt, params, variant=world.adapters[adapter]))
    tokens: dict[str, list[int]] = {}
    while pair.engine.has_unfinished_requests():
        for output in pair.engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert tokens == {str(index): world.expected[adapter][index] for index, adapter in enumerate(which)}
    assert pair.stages() == ALL
    assert pair.graphs.num_replays > 0


@pytest.mark.slow
def test_adapters_share_no_prefix_with_the_base_model():
    world = lora_world()
    built = LIMITS.model_copy(update={"max_loras": 2, "max_lora_rank": 8})
    config = engine_config(TREE, max_loras=2, max_lora_rank=8, max_num_seqs=3, block_size=4, num_kv_blocks=200)
    engine, _, _ = torch_pair(reference("llama").loaded, TREE, config, built=built)
    longest = max(range(len(world.prompts)), key=lambda index: len(world.prompts[index]))
    for which in (0, 1, 2, 1):
        params, prompt = greedy_params(16), tuple(world.prompts[longest])
        engine.add_request(Request("0", prompt, params, variant=world.adapters[which]))
        tokens = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens += output.token_ids
        assert tokens == world.expected[which][longest][:16]


@pytest.mark.slow
def test_adapters_and_prefixes_by_onnx_runtime_give_the_text_of_merged_models(tmp_path):
    world = lora_world()
    room = LIMITS.model_copy(update={"max_loras": 3, "max_lora_rank": 8})
    pair = exported_pair(tmp_path, limits=room)
    engine = engine_by_onnx_runtime(pair, TREE, 4, max_loras=3, max_lora_rank=8, block_size=4)
    which = [0, 1, 2, 3, 1]
    for rounds in range(2):
        for index, adapter in enumerate(which):
            prompt = tuple(world.prompts[index])
            request = Request(f"{rounds}-{index}", prompt, greedy_params(NUM_TOKENS), variant=world.adapters[adapter])
            engine.add_request(request)
        tokens: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        expected = {f"{rounds}-{index}": world.expected[adapter][index] for index, adapter in enumerate(which)}
        assert tokens == expected
    assert engine.block_manager.hit_tokens > 0
