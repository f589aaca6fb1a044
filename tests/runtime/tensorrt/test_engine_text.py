"""The whole engine on the backend tensorrt: its text is transformers' own, whatever shape, batch and drafter."""

import copy
from dataclasses import replace

import pytest
import torch

from tests.needs import needs
from tests.runtime.models import (
    CHAIN,
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    greedy_params,
    new_engine,
    random_head,
    reference,
)
from tests.runtime.scripted import ScriptedDrafter, right_chain
from tests.runtime.tensorrt.draft_parity import latent_config
from tests.runtime.tensorrt.engine_world import base_config, base_session, engine_on, torch_pair
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.round.builder import dummy_decode_batch
from wingbeat.runtime.scheduling.request import SamplingParams

NUM_TOKENS = 64


def limits(speculation, batch):
    return engine_config(speculation, max_num_seqs=batch, num_kv_blocks=None)


@pytest.mark.parametrize("batch", [4, 1])
@pytest.mark.parametrize("shape", ["tree", "chain", "plain"])
@pytest.mark.few(1)
def test_greedy_text_is_that_of_generate(shape, batch):
    expected = reference("llama")
    speculation = CHAIN if shape == "chain" else TREE
    engine, session, _ = torch_pair(expected.loaded, speculation, limits(speculation, batch), shape != "plain")
    texts = Run(engine, expected.prompts, greedy_params(NUM_TOKENS)).finish()
    assert texts == [more[:NUM_TOKENS] for more in expected.continuations]
    # Without drafts the stage of many rows is left to short ends of prompts.
    assert (session.ran.count("plain") > 10 * session.ran.count("verify")) == (shape == "plain")


def test_sampled_text_is_that_of_the_torch_backend():
    expected = reference("llama")
    params = [SamplingParams(max_tokens=24, temperature=0.8, seed=7 + row, ignore_eos=True) for row in range(4)]
    prompts = expected.prompts[:4]
    engine, _, _ = torch_pair(expected.loaded, TREE, limits(TREE, 4))
    ours = Run(engine, prompts, params).finish()
    torch_engine = new_engine(expected.loaded, engine_config(TREE), eagle_drafter(expected.loaded, TREE))
    theirs = Run(torch_engine, prompts, params).finish()
    torch_engine.model.remove_taps()
    assert ours == theirs


def test_costs_are_measured_at_the_batch_asked_for_and_touch_no_sequence():
    expected = reference("llama")
    engine, session, _ = torch_pair(expected.loaded, TREE, limits(TREE, 3), with_drafter=False)
    started = Run(engine, expected.prompts[:3], greedy_params(16))
    for _ in range(6):
        started.step()
    batch = dummy_decode_batch(engine.cache, 3, 4, 2)
    session.ran.clear()
    with torch.inference_mode():
        assert engine.model(batch).logits.shape == (12, engine.loaded.vocab_size)
    assert session.bound[session.ran[0]]["input_ids"].shape == (3, 4)
    assert started.finish() == [more[:16] for more in expected.continuations[:3]]


@needs("adaptive")
@pytest.mark.parametrize("block_size", [16, 256], ids=["of many blocks", "of one block"])
def test_the_costs_of_an_engines_drafts_are_measured_over_sequences(block_size):
    expected = reference("llama")
    adaptive = replace(TREE, adaptive=True)
    config = replace(limits(adaptive, 3), block_size=block_size, max_model_len=min(block_size, 64) * 2)
    engine, _, _ = torch_pair(expected.loaded, adaptive, config)
    assert engine.stats().policy is not None


def test_a_drafter_that_torch_runs_drafts_beside_the_engine():
    expected = reference("llama")
    config = base_config(expected.loaded, ())
    drafter = ScriptedDrafter(expected.sequences, right_chain, expected.loaded.vocab_size)
    engine = engine_on(base_session(expected.loaded, config), config, limits(CHAIN, 2), drafter)
    assert Run(engine, expected.prompts[:2], greedy_params(32)).finish() == [
        more[:32] for more in expected.continuations[:2]
    ]
    assert engine.speculation.num_drafts > 0


def test_without_a_drafter_nothing_of_trees_is_run():
    expected = reference("llama")
    engine, session, draft = torch_pair(expected.loaded, TREE, limits(TREE, 2), with_drafter=False)
    Run(engine, expected.prompts[:2], greedy_params(8)).finish()
    assert draft is None
    assert "hidden_states" not in session.outputs
    assert engine.model.taps_size == 0


HEADS = {
    "turns half": lambda config: EagleHead(replace(config, rotary_dim=4, rope_interleaved=True)),
    "three layers": lambda config: EagleHead(replace(config, num_layers=3, qk_norm=True, norm_output=True)),
    "MLA": lambda config: latent_config(
        **vars(config) | {"num_key_value_heads": 4}, kv_rank=14, rope_dim=4, value_dim=6
    ).new_head(),
}
"""Functions that make heads of other shapes from a config like that of `random_head`."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_heads_of_other_shapes_draft_what_they_draft_by_torch(kind):
    expected, counts = reference("llama"), []
    head = HEADS[kind](random_head(expected.loaded).config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for by_engine in (True, False):
        if by_engine:
            engine, _, _ = torch_pair(expected.loaded, TREE, limits(TREE, 4), head=head.eval())
        else:
            drafter = EagleDrafter(copy.deepcopy(head), TREE)
            engine = new_engine(expected.loaded, engine_config(TREE, max_num_seqs=4), drafter)
        texts = Run(engine, expected.prompts[:4], greedy_params(24)).finish()
        assert texts == [more[:24] for more in expected.continuations[:4]]
        counts.append((engine.speculation.num_drafts, engine.speculation.num_accepted_tokens))
        engine.model.remove_taps()
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_trees_drafted_by_the_engine_are_those_of_the_torch_drafter():
    expected = reference("llama")
    counts = []
    for build in ("engine", "torch"):
        if build == "engine":
            engine, _, _ = torch_pair(expected.loaded, TREE, limits(TREE, 4))
        else:
            engine = new_engine(
                expected.loaded, engine_config(TREE, max_num_seqs=4), eagle_drafter(expected.loaded, TREE)
            )
        Run(engine, expected.prompts[:4], greedy_params(32)).finish()
        counts.append((engine.speculation.num_drafts, engine.speculation.num_accepted_tokens))
        engine.model.remove_taps()
    assert counts[0] == counts[1]
