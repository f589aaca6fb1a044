"""Prefixes over an engine: cached, shared between running sequences, saved and loaded; texts are those of torch."""

import pytest

from tests.runtime.models import TREE, Run, eagle_drafter, engine_config, greedy_params, new_engine, reference
from tests.runtime.prefix_world import finish, prefix_of, save, store_of
from tests.runtime.tensorrt.engine_world import LIMITS, torch_pair
from wingbeat.runtime.prefixes.identity import identity_of
from wingbeat.runtime.prefixes.prefix_keeper import PrefixKeeper
from wingbeat.runtime.scheduling.request import Request

BLOCK, NUM_TOKENS = 4, 20
SMALL = {"max_num_seqs": 3, "block_size": BLOCK, "num_kv_blocks": 200}


def paired(by_engine=True, with_drafter=True, **limits):
    """An engine with pages, or one of torch."""
    loaded, config = reference("llama").loaded, engine_config(TREE, **SMALL | limits)
    if by_engine:
        return torch_pair(loaded, TREE, config, with_drafter)[0]
    return new_engine(loaded, config, eagle_drafter(loaded, TREE) if with_drafter else None)


def branches(num=3):
    """Prompts that begin alike, for 30 tokens, and go on differently."""
    expected = reference("llama")
    common = (expected.prompts[0] + expected.continuations[0])[:30]
    return [[*common, *expected.prompts[1 + index][:5]] for index in range(num)]


def written(engine, prompts, one_by_one):
    """Texts and cached tokens by prompt."""
    texts, cached = [], []
    for part in [[prompt] for prompt in prompts] if one_by_one else [prompts[:1], prompts[1:]]:
        run = Run(engine, part, greedy_params(NUM_TOKENS))
        texts += run.finish()
        cached += [run.last[index].num_cached_tokens for index in range(len(part))]
    engine.check_integrity()
    engine.model.remove_taps()
    return texts, cached


@pytest.mark.few(1)
@pytest.mark.parametrize("with_drafter", [True, False], ids=["tree", "plain"])
@pytest.mark.parametrize("one_by_one", [True, False])
def test_cached_prefixes_are_found_and_texts_and_drafts_are_those_of_torch(one_by_one, with_drafter):
    found = []
    for by_engine in (True, False):
        engine = paired(by_engine, with_drafter)
        found.append((*written(engine, branches(), one_by_one), engine.speculation.num_accepted_tokens))
    assert found[0] == found[1]
    assert found[0][1] == [0, 28, 28]


@pytest.mark.slow
@pytest.mark.parametrize("length", [9, 10, 13])
def test_prompts_that_are_cached_but_for_their_end_are_right_in_another_slot(length):
    expected = reference("llama")
    first, second = (expected.sequences[index][:length] for index in (0, 4))
    texts = []
    for engine in (paired(), paired(by_engine=False)):
        for prompts in ([first, second], [second, first], [first]):
            run = Run(engine, prompts, greedy_params(12))
            texts.append(run.finish())
        assert run.last[0].num_cached_tokens == (length - 1) // BLOCK * BLOCK
        texts.append(engine.speculation.num_accepted_tokens)
        engine.model.remove_taps()
    assert texts[:4] == texts[4:]
    assert texts[0] == texts[1][::-1]


@pytest.mark.slow
def test_a_running_sequence_lends_its_blocks_and_keeps_its_text():
    prompts = branches()
    alone, _ = written(paired(enable_prefix_caching=False), prompts, one_by_one=True)
    engine = paired()
    first = Run(engine, prompts[:1], greedy_params(NUM_TOKENS))
    for _ in range(3):
        first.step()
    engine.add_request(Request("later", tuple(prompts[1]), greedy_params(NUM_TOKENS)))
    texts, cached = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts.setdefault(output.request_id, []).extend(output.token_ids)
            cached = max(cached, output.num_cached_tokens)
    assert first.tokens[0] + texts["0"] == alone[0]
    assert texts["later"] == alone[1]
    assert cached == 28


@pytest.mark.slow
def test_sequences_that_make_room_for_others_are_computed_again():
    expected = reference("llama")
    engine, longest = paired(num_kv_blocks=45, max_model_len=140), (2, 4, 6)
    texts = Run(engine, [expected.prompts[index] for index in longest], greedy_params(64)).finish()
    assert texts == [expected.continuations[index][:64] for index in longest]
    assert engine.scheduler.num_preemptions > 0


def test_without_cached_prefixes_there_are_no_pages():
    engine = paired(enable_prefix_caching=False)
    assert engine.cache.linear.pages == []
    assert engine.cache.block_size == LIMITS.capacity
    assert paired().cache.linear.pages != []


@pytest.mark.slow
@pytest.mark.parametrize("with_drafter", [True, False], ids=["tree", "plain"])
def test_a_saved_prefix_is_loaded_by_another_engine_and_hit(with_drafter, tmp_path):
    prompts = branches()
    expected, _ = written(paired(False, with_drafter), prompts, one_by_one=True)
    for again in (False, True):
        engine = paired(with_drafter=with_drafter)
        keeper = PrefixKeeper(engine, store_of(tmp_path))
        if again:
            assert [prefix.token_ids for prefix in keeper.open()] == [tuple(prompts[0][:30])]
        else:
            save(engine, keeper, prefix_of(prompts[0][:30]))
        assert [prefix["name"] for prefix in keeper.describe()["prefixes"]] == ["system"]
        texts, cached = [], []
        for prompt in prompts:
            run = Run(engine, [prompt], greedy_params(NUM_TOKENS))
            texts += run.finish()
            cached.append(run.last[0].num_cached_tokens)
        finish(engine, keeper)
        keeper.close()
        assert texts == expected
        assert min(cached) >= 28
        assert not with_drafter or engine.speculation.num_drafts > 0


def test_what_an_engine_computed_is_not_taken_for_torchs(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    engine = paired()
    by_torch = identity_of(tmp_path, reference("llama").loaded, BLOCK)
    by_engine = identity_of(tmp_path, engine.loaded, BLOCK)
    assert by_torch["weights"] != by_engine["weights"]
    assert by_torch | {"weights": ""} == by_engine | {"weights": ""}
