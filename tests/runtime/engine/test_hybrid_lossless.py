"""Models with recurrent state write what generate() writes, whatever is drafted, cached, preempted or replayed."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.hybrids import CONFIGS, MTP_NORMS, NUM_TOKENS, hybrid, needs_states, random_hybrid
from tests.runtime.lossless_table import AXES, drafter_of, rows
from tests.runtime.models import (
    CHAIN,
    TREE,
    Run,
    engine_config,
    generate,
    greedy_params,
    new_engine,
)
from tests.runtime.scripted import ScriptedDrafter, right_chain, right_tree
from tests.runtime.watchers import ContextDrafter, FailingEnd, dense_taps
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.loading.loader import load_model

pytestmark = needs_states

ROOMS = {
    "roomy": {},
    # Requests are preempted, prompts come in pieces, states are evicted.
    "tight": {"max_model_len": 96, "num_kv_blocks": 32, "max_num_batched_tokens": 24, "num_saved_states": 3},
    "trickle": {"max_num_batched_tokens": 5},
    "no cache": {"enable_prefix_caching": False},
}


def config_of(speculation=TREE, **limits):
    """Limits under which states are kept at the end of every other block."""
    return engine_config(speculation, **({"block_size": 4, "state_interval": 8, "num_kv_blocks": 400} | limits))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_references_are_decisive_and_varied(name):
    ref = hybrid(name)
    assert ref.loaded.keeps_states
    assert sum(len(set(tokens)) for tokens in ref.continuations) > 4 * 6


@pytest.mark.few(2)
@pytest.mark.parametrize(AXES, rows(CONFIGS, ROOMS))
def test_the_text_is_that_of_generate(model, kind, shape, room, device):
    ref, speculation = hybrid(model), {"tree": TREE, "chain": CHAIN}[shape]
    drafter, config = drafter_of(kind, ref, speculation), config_of(speculation, **ROOMS[room])
    if device == "host":
        engine = new_engine(ref.loaded, config, drafter)
    else:  # with a channel that lets a drafter in this process start as soon as a round is launched
        at_once = partial(InProcessChannel, device=ref.loaded.device)
        engine = build_engine(ref.loaded, config, drafter, at_once, on_host=False)
    try:
        assert Run(engine, ref.prompts, greedy_params(NUM_TOKENS)).finish() == ref.continuations
    finally:
        engine.model.remove_taps()
    assert (engine.stats().num_preemptions > 0) == (room == "tight")
    if kind == "right":
        assert engine.speculation.acceptance_length > 4


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_sampled_text_is_that_of_plain_decoding(name):
    ref = hybrid(name)
    params = [SamplingParams(30, 0.8, 0.9, seed=seed, ignore_eos=True) for seed in range(len(ref.prompts))]
    plain, _ = generate(ref.loaded, config_of(), None, ref.prompts, params)
    sequences = [prompt + more for prompt, more in zip(ref.prompts, plain, strict=True)]
    for speculation, plan in ((CHAIN, right_chain), (TREE, right_tree)):
        told = ScriptedDrafter(sequences, plan, ref.loaded.vocab_size)
        tokens, engine = generate(ref.loaded, config_of(speculation), told, ref.prompts, params)
        assert tokens == plain
        assert engine.speculation.acceptance_length > 4


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["none", "right", "eagle"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_prefix_is_found_as_far_as_its_state_is_kept(name, kind):
    """A second turn behind the first one's answer: states of the prompt and of accepted paths go on."""
    ref = hybrid(name)
    engine = new_engine(ref.loaded, config_of(), drafter_of(kind, ref, TREE))
    try:
        first = Run(engine, ref.prompts, greedy_params(20)).finish()
        prompts = [prompt + more for prompt, more in zip(ref.prompts, first, strict=True)]
        run = Run(engine, prompts, greedy_params(NUM_TOKENS - 20))
        assert run.finish() == [tokens[20:] for tokens in ref.continuations]
    finally:
        engine.model.remove_taps()
    # Cached tokens are whole state intervals before the last token, which is left to compute.
    assert [run.last[index].num_cached_tokens for index in range(len(prompts))] == [
        (len(prompt) - 1) // 8 * 8 for prompt in prompts
    ]


def test_a_state_that_made_room_is_not_found():
    ref = hybrid("lfm2")
    engine = new_engine(ref.loaded, config_of(num_saved_states=1))
    Run(engine, ref.prompts[1:2], greedy_params(2)).finish()
    hits = []
    for prompt in (ref.prompts[1], ref.prompts[1][:20]):
        run = Run(engine, [prompt], greedy_params(4))
        run.finish()
        hits.append(run.last[0].num_cached_tokens)
    assert hits == [24, 0]


@pytest.fixture
def rig(rigs):
    return partial(rigs, block_size=4, state_interval=8, num_kv_blocks=400)


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", [64, 9])
@pytest.mark.parametrize("what", ["acquire", "wait"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_lost_drafter_costs_no_request_and_its_heir_gets_true_taps(rig, name, what, budget):
    """Contexts are replayed from position 0, while the sequences' recurrent states are far ahead."""
    ref = hybrid(name)
    taps = dense_taps(ref)
    one = rig(
        ref, ContextDrafter(ref, taps), lambda end: FailingEnd(end, what, 2, False), max_num_batched_tokens=budget
    )
    run = Run(one.engine, ref.prompts, greedy_params(NUM_TOKENS))
    while one.engine.drafter_state == "attached":
        one.step(run)
    one.step(run)
    heir = ContextDrafter(ref, taps)
    one.replace(heir)
    assert one.finish(run) == ref.continuations
    assert heir.num_checked > 0
    assert one.engine.stats().num_replayed_tokens > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", [64, 9])
@pytest.mark.parametrize("name", CONFIGS)
def test_prefixes_the_drafter_never_saw_are_replayed_from_a_kept_state(rig, name, budget):
    ref = hybrid(name)
    drafter = ContextDrafter(ref, dense_taps(ref))
    one = rig(ref, drafter, max_num_batched_tokens=budget)
    one.run(ref.prompts, greedy_params(NUM_TOKENS, speculation=False))
    run = Run(one.engine, ref.prompts, greedy_params(NUM_TOKENS))
    assert one.finish(run) == ref.continuations
    assert drafter.num_checked > 0
    assert one.engine.stats().num_replayed_tokens > 0


def with_mtp_module(name, folder):
    """A hybrid's checkpoint with an MTP module in Qwen's layout: a copy of its last layer behind a random fusion."""
    random_hybrid(name).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last = "model.layers.3."
    tensors |= {
        "mtp.layers.0." + key.removeprefix(last): value.clone() for key, value in tensors.items() if last in key
    }
    generator = torch.Generator().manual_seed(2)
    tensors |= {f"mtp.{key}.weight": torch.rand(64, generator=generator) for key in MTP_NORMS}
    tensors["mtp.fc.weight"] = 0.2 * torch.randn(64, 128, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_a_hybrids_own_mtp_module_drafts_for_it(name, tmp_path):
    with_mtp_module(name, tmp_path)
    ref, loaded = hybrid(name), load_model(tmp_path, torch.float32, torch.device("cpu"))
    drafter = load_drafter("mtp", TargetDescription.from_checkpoint(tmp_path), CHAIN)
    tokens, engine = generate(loaded, config_of(CHAIN), drafter, ref.prompts, greedy_params(NUM_TOKENS))
    assert tokens == ref.continuations
    assert engine.speculation.num_drafts > 0
    assert engine.speculation.num_draft_tokens > 3 * engine.speculation.num_drafts
