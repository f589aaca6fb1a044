"""Requests with adapters, mixed in one batch, write what transformers writes with each adapter merged."""

from contextlib import contextmanager

import pytest

from tests.runtime.by_torch import without_cpu
from tests.runtime.lora_world import KINDS, NUM_TOKENS, LoraWorld, lora_world, merge, num_resident
from tests.runtime.models import (
    CHAIN,
    TREE,
    eagle_drafter,
    engine_config,
    generate,
    greedy_params,
    random_model,
)
from tests.runtime.recorded_graphs import RecordingDevice
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.loading.loader import prepare_model

SHAPES = {"plain": None, "chain": CHAIN, "tree": TREE}


@contextmanager
def engine_of(world: LoraWorld, shape=None, device=None, on_host=None, **limits):
    """An engine of the world's model, which is free for the next one behind it."""
    drafter = None if shape is None else eagle_drafter(world.loaded, shape)
    config = engine_config(shape or TREE, **limits)
    engine = build_engine(world.loaded, config, drafter, InProcessChannel, device, on_host)
    try:
        yield engine
    finally:
        engine.model.remove_taps()
        assert engine.scheduler.running == []
        world.loaded.parts["adapters"].rows = None


def add(engine, world, which, index, params=None, name=None):
    params = params or greedy_params(NUM_TOKENS)
    prompt = tuple(world.prompts[index])
    engine.add_request(Request(name or str(index), prompt, params, variant=world.adapters[which]))


def finish(engine, on_step=lambda number: None):
    """Tokens and last outputs by request id."""
    tokens, last, number = {}, {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                last[output.request_id] = output
        on_step(number)
        number += 1
    engine.check_integrity()
    return tokens, last


def check_mixed(engine, world):
    """Prompts take turns with the base model and the adapters; each writes what its merged model writes."""
    mixed = {index: index % len(world.adapters) for index in range(len(world.prompts))}
    for index, which in mixed.items():
        add(engine, world, which, index)
    tokens, last = finish(engine)
    assert tokens == {str(index): world.expected[which][index] for index, which in mixed.items()}
    return last


@pytest.mark.parametrize("rounds", ["eager", "fixed shapes", "graphs", "overlapped"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.few(2)
def test_mixed_adapters_write_what_each_merged_model_writes(shape, rounds):
    device = RecordingDevice() if rounds == "graphs" else None
    on_host = False if rounds in ("fixed shapes", "overlapped") else None
    overlap = {"overlap": True} if rounds == "overlapped" else {}
    with engine_of(lora_world(), SHAPES[shape], device, on_host, **overlap) as engine:
        check_mixed(engine, lora_world())


def test_the_adapters_of_these_tests_write_other_texts_than_the_base_model():
    expected = lora_world().expected
    for index in range(len(lora_world().prompts)):
        assert len({tuple(texts[index]) for texts in expected}) == len(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma3", "deepseek_v3"))]
)
def test_layers_that_run_as_transformers_wrote_them_are_adapted_too(name):
    kinds = {"attention": KINDS["attention"]} if name == "qwen3_moe" else {"plain": KINDS["plain"]}
    if name == "deepseek_v3":
        kinds = {"latent": {"targets": ("q_b_proj", "kv_a_proj_with_mqa", "o_proj"), "rank": 4}}
    world = LoraWorld(name, kinds=kinds)
    with engine_of(world, CHAIN) as engine:
        check_mixed(engine, world)


@pytest.mark.slow
def test_without_the_kernels_of_cpus_texts_are_the_same():
    with without_cpu():
        world = LoraWorld("llama", kinds={"all": KINDS["all"], "attention": KINDS["attention"]})
        with engine_of(world, CHAIN) as engine:
            check_mixed(engine, world)


@pytest.mark.parametrize("shape", ["plain", "chain"])
def test_a_seed_draws_what_it_draws_with_the_adapter_merged(shape):
    world, which = lora_world(), 1
    params = [SamplingParams(NUM_TOKENS, temperature=0.8, seed=seed, ignore_eos=True) for seed in range(4)]
    merged = prepare_model(merge(random_model("llama"), world.folders[which]), "merged")
    expected, _ = generate(merged, engine_config(), None, world.prompts[:4], params)
    with engine_of(world, SHAPES[shape]) as engine:
        for index, param in enumerate(params):
            add(engine, world, which, index, param)
            add(engine, world, 2, index, param, name=f"beside {index}")
        tokens, _ = finish(engine)
    assert [tokens[str(index)] for index in range(4)] == expected


def test_preempted_sequences_go_on_with_their_adapter():
    world = lora_world()
    with engine_of(world, CHAIN, max_model_len=128, num_kv_blocks=16, max_num_batched_tokens=24) as engine:
        check_mixed(engine, world)
        assert engine.scheduler.num_preemptions > 0


def test_a_cached_prefix_is_of_one_adapter_alone():
    world, index = lora_world(), 4
    with engine_of(world, CHAIN, max_num_seqs=1) as engine:
        for number, which in enumerate((0, 1, 2, 1, 0)):
            add(engine, world, which, index, name=f"{number}")
        tokens, last = finish(engine)
    assert [tokens[f"{number}"] for number in range(5)] == [world.expected[w][index] for w in (0, 1, 2, 1, 0)]
    cached = [last[f"{number}"].num_cached_tokens for number in range(5)]
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) > 0


@pytest.mark.slow
def test_more_adapters_than_places_take_turns():
    world = LoraWorld("llama", max_loras=2)
    with engine_of(world, CHAIN) as engine:
        check_mixed(engine, world)
    assert num_resident(world.loaded.parts["adapters"].resident) == 2


@pytest.mark.slow
def test_requests_of_an_adapter_that_is_unloaded_end_and_then_its_place_is_free():
    world = LoraWorld("llama", kinds={"all": KINDS["all"], "plain": KINDS["plain"]})
    resident, digest = world.loaded.parts["adapters"].resident, world.adapters[1].digest
    seen = []

    def unload(number: int) -> None:
        if number == 3:
            resident.unload(digest)
        seen.append(resident.num_users(digest))

    with engine_of(world, CHAIN, max_num_seqs=2) as engine:
        for index in range(4):
            add(engine, world, 1, index)
        tokens, _ = finish(engine, unload)
        assert tokens == {str(index): world.expected[1][index] for index in range(4)}
        assert max(seen) == 2
        resident.unload(digest)
        assert num_resident(resident) == 0


@pytest.mark.slow
def test_files_that_changed_fail_the_requests_for_them_and_no_others():
    world = LoraWorld("llama", max_loras=1, kinds={"all": KINDS["all"], "plain": KINDS["plain"]})
    with (world.folders[1] / "adapter_config.json").open("a") as file:
        file.write(" ")
    with engine_of(world, CHAIN) as engine:
        for index, which in enumerate((1, 2, 0)):
            add(engine, world, which, index)
        tokens, last = finish(engine)
    assert "the files of adapter all have changed" in last["0"].failure
    assert tokens == {"0": []} | {str(index): world.expected[which][index] for index, which in ((1, 2), (2, 0))}


def test_an_engine_without_adapters_refuses_a_request_for_one():
    world = lora_world()
    plain = prepare_model(random_model("llama"), "llama")
    engine = build_engine(plain, engine_config(), None, InProcessChannel)
    with pytest.raises(ValueError, match="model all is a variant: this engine serves none"):
        add(engine, world, 1, 0)
    assert not any("Adapted" in kind.__name__ for module in plain.model.modules() for kind in type(module).__mro__)


def test_pefts_merged_model_writes_the_same(tmp_path):
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, use_rslora=True
    )
    torch.manual_seed(5)
    model = peft.get_peft_model(random_model("llama"), config)
    model.save_pretrained(tmp_path)
    world = LoraWorld("llama", kinds={})
    world.take("peft", tmp_path, model.merge_and_unload())
    with engine_of(world, CHAIN) as engine:
        check_mixed(engine, world)
