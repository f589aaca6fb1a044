"""A prefix whose keys, values and states come from disk gives the text of generate()."""

import pytest

from tests.runtime.hybrids import hybrid, needs_states
from tests.runtime.models import CHAIN, TREE, eagle_drafter, reference
from tests.runtime.prefix_world import Kept, prefix_of
from tests.runtime.scripted import ScriptedDrafter, right_chain, right_tree
from wingbeat.runtime.scheduling.request import Request, SamplingParams

SHAPES = {"chain": CHAIN, "tree": TREE}


def drafter_of(kind, ref, shape):
    if kind == "eagle":
        return eagle_drafter(ref.loaded, SHAPES[shape])
    plan = right_chain if shape == "chain" else right_tree
    return None if kind == "none" else ScriptedDrafter(ref.sequences, plan, ref.loaded.vocab_size)


def reloaded(ref, folder, tokens, kind="none", shape="tree", **limits):
    """An engine that has read a prefix from disk, which another one has computed."""
    first = Kept(ref.loaded, folder, **limits)
    first.save(prefix_of(tokens))
    first.close()
    second = Kept(ref.loaded, folder, drafter_of(kind, ref, shape), speculation=SHAPES[shape], **limits)
    (prefix,) = second.keeper.open()
    assert prefix.token_ids == tuple(tokens)
    assert not second.engine.has_unfinished_requests()
    return second


@pytest.mark.parametrize("speculates", [True, False])
@pytest.mark.parametrize("kind", ["none", "eagle", "right"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.few(5)
def test_a_prefix_from_disk_gives_the_text_of_generate(tmp_path, shape, kind, speculates):
    ref, index = reference("llama"), 4
    one = reloaded(ref, tmp_path, ref.prompts[index][:50], kind, shape)
    try:
        tokens, cached = one.run([ref.prompts[index]], 40, speculation=speculates)
        again, _ = one.run([ref.prompts[index]], 40, speculation=speculates)
    finally:
        one.close()
    assert tokens == again == [ref.continuations[index][:40]]
    assert cached == [48]
    if kind == "right" and speculates:
        assert one.engine.speculation.acceptance_length > 3


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3"])
def test_windows_and_other_shapes_of_keys_come_back(tmp_path, name):
    ref, index = reference(name), 4
    one = reloaded(ref, tmp_path, ref.prompts[index][:50])
    try:
        assert one.run([ref.prompts[index]], 30) == ([ref.continuations[index][:30]], [48])
    finally:
        one.close()


def test_a_seed_draws_behind_a_prefix_from_disk_what_it_draws_without(tmp_path):
    ref, index = reference("llama"), 4
    params = SamplingParams(24, temperature=0.8, seed=5, ignore_eos=True)
    texts = []
    for folder in (None, tmp_path):
        one = Kept(ref.loaded, None) if folder is None else reloaded(ref, folder, ref.prompts[index], "eagle")
        one.engine.add_request(Request("r", tuple(ref.prompts[index]), params))
        texts.append([])
        while one.engine.has_unfinished_requests():
            texts[-1] += [token for output in one.engine.step() for token in output.token_ids]
        one.close()
    assert texts[0] == texts[1]


@needs_states
@pytest.mark.parametrize("kind", ["none", "right", "eagle"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "bamba", "jamba"])
@pytest.mark.few(1)
def test_a_hybrids_state_comes_back_at_the_prefixs_own_end(tmp_path, name, kind):
    """20 tokens end at no multiple of the interval, which is 8."""
    ref, index = hybrid(name), 1
    one = reloaded(ref, tmp_path, ref.prompts[index][:22], kind, "chain")
    try:
        assert one.run([ref.prompts[index]], 24) == ([ref.continuations[index][:24]], [20])
    finally:
        one.close()
