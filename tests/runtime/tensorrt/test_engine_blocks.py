"""Engines of heads that draft a block in one pass: trees and text are those of the torch drafter, family by family."""

import copy

import pytest
import torch

from tests.runtime.models import CHAIN, HIDDEN_SIZE, TREE, Run, engine_config, greedy_params, new_engine, reference
from tests.runtime.one_pass.one_pass_drafts import TAPS, fed, load, trees_of
from tests.runtime.one_pass.one_pass_world import FAMILIES, HIDDEN, random_tensors, raw_config, save_head
from tests.runtime.tensorrt.engine_world import LIMITS, OPS, draft_config, draft_session, torch_pair
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.one_pass.load import load_walker, read_one_pass_checkpoint
from wingbeat.runtime.one_pass.one_pass_drafter import OnePassDrafter
from wingbeat.runtime.tensorrt.block_drafter import BlockDrafter
from wingbeat.runtime.tensorrt.block_graph import BlockGraph

SHAPES = {"tree": SpeculationConfig(draft_steps=5, draft_top_k=3, verify_tree_size=12), "chain": CHAIN}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
VARIANTS = {name: (name, {}) for name in FAMILIES} | {
    "causal-window": ("dflash", SLIDING),
    "window": ("dflash", SLIDING | {"is_causal": False}),
}


def head_of(folder, variant, taps=TAPS):
    family, fields = VARIANTS[variant]
    raw = raw_config(family, taps, 2, block_size=7, **fields)
    return load(folder, raw, random_tensors(raw))


def by_engine(head, speculation):
    """A drafter over the exported module."""
    config = draft_config(head)
    return BlockDrafter(draft_session(head, config), config, copy.deepcopy(head), speculation)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.few(4)
def test_trees_are_those_of_the_torch_drafter(variant, shape, temperature, tmp_path):
    head, speculation, found = head_of(tmp_path, variant), SHAPES[shape], []
    for kind in (by_engine, OnePassDrafter):
        drafter, world = fed(head, speculation, kind, temperatures=(temperature,) * 9)
        found.append(trees_of(drafter, world))
    assert torch.equal(found[0].token_ids, found[1].token_ids)
    assert torch.equal(found[0].parents, found[1].parents)
    torch.testing.assert_close(found[0].scores, found[1].scores, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dflash", "dflash2", "dspark-rnn"])
def test_text_and_accepted_drafts_are_those_of_torch(variant, tmp_path):
    assert HIDDEN == HIDDEN_SIZE
    expected, counts = reference("llama"), []
    head = head_of(tmp_path, variant, taps=(0, 1, 2))
    limits = engine_config(TREE, max_num_seqs=4, block_size=4, num_kv_blocks=None)
    for with_engine in (True, False):
        if with_engine:
            engine, session, draft = torch_pair(expected.loaded, TREE, limits, head=head)
        else:
            torch_limits = engine_config(TREE, max_num_seqs=4, block_size=4)
            engine = new_engine(expected.loaded, torch_limits, OnePassDrafter(copy.deepcopy(head), TREE))
        texts = Run(engine, expected.prompts[:5], greedy_params(24)).finish()
        assert texts == [more[:24] for more in expected.continuations[:5]]
        counts.append((engine.speculation.num_drafts, engine.speculation.num_accepted_tokens))
        engine.model.remove_taps()
    assert counts[0] == counts[1]
    assert draft.ran.count("proposal") <= session.ran.count("verify") + session.ran.count("plain")


@pytest.mark.parametrize("family", ["dflash2", "dspark-gated", "dspark-rnn", "dflash"])
def test_a_walker_has_what_walks_need_and_nothing_else(family, tmp_path):
    head = head_of(tmp_path, family)
    checkpoint = read_one_pass_checkpoint(tmp_path)
    walker = load_walker(checkpoint, head.config, head.draft_token_ids, torch.float32, "cpu")
    there = {name for name, tensor in walker.state_dict().items() if not tensor.is_meta}
    assert there - {"draft_token_ids"} == {
        name for name in head.state_dict() if name.startswith(("markov", "selector"))
    }
    logits = torch.randn(2, head.config.num_drafted, head.config.draft_vocab_size)
    hidden, tokens = torch.randn(2, head.config.num_drafted, HIDDEN), torch.tensor([[3], [5]])
    steps = [one.walk_over(logits, hidden).step(0, tokens, torch.zeros_like(tokens)) for one in (head, walker)]
    assert torch.equal(steps[0].logits, steps[1].logits)


def test_trees_deeper_than_the_block_are_refused(tmp_path):
    head = head_of(tmp_path, "dflash")
    with pytest.raises(ValueError, match="draft_steps=9: this head drafts 6 tokens at most"):
        by_engine(head, SpeculationConfig(draft_steps=9, draft_top_k=1, verify_tree_size=10))


def test_a_block_larger_than_the_engine_has_rows_for_is_refused(tmp_path):
    head = head_of(tmp_path, "dflash")
    small = LIMITS.model_copy(update={"max_draft_tree_size": 6})
    config = draft_config(head).model_copy(update={"limits": small})
    with pytest.raises(ValueError, match="a draft has 7 nodes after its context"):
        BlockDrafter(draft_session(head, config), config, head, CHAIN)


def test_attention_sinks_are_refused(tmp_path):
    raw = raw_config("dflash", TAPS, 2)
    head = load(save_head(tmp_path, raw, random_tensors(raw)), raw, random_tensors(raw))
    object.__setattr__(head.config, "sinks", True)
    with pytest.raises(ValueError, match="attention sinks"):
        BlockGraph(head, OPS)
