"""Greedy decoding through the whole engine writes what transformers' generate() writes, token for token."""

import pytest

from tests.runtime.models import (
    CHAIN,
    DEMO_PAIR,
    NUM_TOKENS,
    TREE,
    WINDOW,
    eagle_drafter,
    engine_config,
    generate,
    greedy_params,
    reference,
)
from tests.runtime.scripted import ScriptedDrafter, malform, random_tree, right_chain, right_tree, wrong_tree
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.drafters.ngram import NgramDrafter
from wingbeat.runtime.heads.load import load_eagle_head

MODELS = ["llama", "qwen3", "mistral", "gemma3", "qwen3_moe"]
if DEMO_PAIR.is_dir():
    MODELS.append("demo")
SHAPES = {"chain": CHAIN, "tree": TREE}


def scripted(ref, plan, corrupt=None):
    return ScriptedDrafter(ref.sequences, plan, ref.loaded.vocab_size, corrupt)


def demo_drafter(ref, speculation):
    config = ref.loaded.model.config
    embedding = ref.loaded.model.get_input_embeddings().weight
    head = load_eagle_head(
        DEMO_PAIR / "drafter",
        target_hidden_size=config.hidden_size,
        target_num_layers=config.num_hidden_layers,
        target_vocab_size=config.vocab_size,
        target_embedding=embedding,
    )
    return EagleDrafter(head, speculation)


def eagle(ref, speculation):
    return demo_drafter(ref, speculation) if ref.name == "demo" else eagle_drafter(ref.loaded, speculation)


@pytest.mark.parametrize("model", MODELS)
def test_references_are_decisive_and_varied(model):
    ref = reference(model)
    # Rounding moves these logits by some 1e-5: no choice below hangs on it.
    assert ref.smallest_gap > 1e-4
    assert sum(len(set(tokens)) for tokens in ref.continuations) > 8 * 10
    assert min(len(sequence) for sequence in ref.sequences) > 4 * WINDOW


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("model", MODELS)
def test_plain(model, batch):
    ref = reference(model)
    count = 8 if batch == 8 else 2
    config = engine_config(max_num_seqs=batch)
    tokens, _ = generate(ref.loaded, config, None, ref.prompts[:count], greedy_params())
    assert tokens == ref.continuations[:count]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("model", MODELS)
def test_eagle_head(model, shape, batch):
    ref = reference(model)
    count = 8 if batch == 8 else 2
    config = engine_config(SHAPES[shape], max_num_seqs=batch)
    drafter = eagle(ref, SHAPES[shape])
    tokens, engine = generate(ref.loaded, config, drafter, ref.prompts[:count], greedy_params())
    assert tokens == ref.continuations[:count]
    assert engine.speculation.num_drafts > count * NUM_TOKENS / 6
    assert engine.drafter_state == "attached"


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("model", MODELS)
def test_always_right(model, shape, batch):
    """In the tree every accepted node lies behind two decoys, so that its KV must be moved to where it belongs."""
    ref = reference(model)
    config = engine_config(SHAPES[shape], max_num_seqs=batch)
    drafter = scripted(ref, right_chain if shape == "chain" else right_tree)
    tokens, engine = generate(ref.loaded, config, drafter, ref.prompts, greedy_params())
    assert tokens == ref.continuations
    # One token comes with the prompt and the last one alone; each round between brings five drafted ones and the bonus.
    num_drafts = 8 * ((NUM_TOKENS - 1) // 6)
    assert engine.speculation.num_drafts == num_drafts
    assert engine.speculation.num_accepted_tokens == 5 * num_drafts
    assert drafter.num_unknown == 0 or batch == 1


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_always_wrong(model):
    ref = reference(model)
    tokens, engine = generate(ref.loaded, engine_config(), scripted(ref, wrong_tree), ref.prompts, greedy_params())
    assert tokens == ref.continuations
    assert engine.speculation.num_drafts > 8 * NUM_TOKENS * 0.9
    assert engine.speculation.num_accepted_tokens == 0


@pytest.mark.parametrize("model", MODELS)
def test_prompt_lookup(model):
    ref = reference(model)
    tokens, engine = generate(ref.loaded, engine_config(), NgramDrafter(TREE), ref.prompts, greedy_params())
    assert tokens == ref.continuations
    assert engine.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("model", ["llama", "mistral", "gemma3", "qwen3_moe"])
def test_random_trees(model):
    ref = reference(model)
    tokens, engine = generate(ref.loaded, engine_config(), scripted(ref, random_tree), ref.prompts, greedy_params())
    assert tokens == ref.continuations
    assert engine.speculation.num_accepted_tokens > 8 * 20


@pytest.mark.parametrize("speculation", [SpeculationConfig(draft_top_k=1, draft_steps=5), SpeculationConfig(3, 4, 16)])
def test_trees_the_configuration_does_not_foresee(speculation):
    """Branches where chains are configured, and nodes deeper than the longest path a round may emit."""
    ref = reference("llama")

    def plan(upcoming, vocab_size, chance):
        room = speculation.num_nodes - 1
        if speculation.draft_top_k == 1:
            return [(vocab_size - 1 - upcoming[0], 0), *((t, i and i + 1) for i, t in enumerate(upcoming))][:room]
        nodes = right_tree(upcoming, vocab_size, chance)[:room]
        return nodes + [(upcoming[0], len(nodes) + extra) for extra in range(room - len(nodes))]

    tokens, engine = generate(ref.loaded, engine_config(speculation), scripted(ref, plan), ref.prompts, greedy_params())
    assert tokens == ref.continuations
    assert engine.drafter_state == "attached"


@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_malformed_trees_are_dropped(model):
    ref = reference(model)
    drafter = scripted(ref, right_tree, malform)
    tokens, engine = generate(ref.loaded, engine_config(), drafter, ref.prompts, greedy_params())
    assert tokens == ref.continuations
    assert engine.speculation.num_drafts == 0
    assert drafter.num_trees > 8 * NUM_TOKENS * 0.9


def test_some_malformed_among_good_trees():
    ref = reference("llama")

    def sometimes(tree, chance):
        rows = [row for row in range(len(tree.num_valid)) if chance.random() < 0.4]
        for row in rows:
            malform(type(tree)(*(part[row : row + 1] for part in tree)), chance)

    drafter = scripted(ref, right_tree, sometimes)
    tokens, engine = generate(ref.loaded, engine_config(), drafter, ref.prompts, greedy_params())
    assert tokens == ref.continuations
    assert 0 < engine.speculation.num_drafts < drafter.num_trees
