"""Requests that ask for their draft trees get them, the others do not; the tokens are the same."""

from dataclasses import replace

import pytest

from tests.runtime.models import TREE, engine_config, greedy_params, reference
from tests.runtime.recorded_graphs import RecordingDevice
from tests.runtime.scripted import ScriptedDrafter, random_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import Request

NUM_TOKENS = 48


@pytest.fixture(scope="module")
def ref():
    return reference("llama")


def run(ref, params, speculation=TREE, device=None, **limits):
    """Outputs by prompt, each output with one round."""
    drafter = ScriptedDrafter(ref.sequences, random_tree, ref.loaded.vocab_size)
    engine = build_engine(ref.loaded, engine_config(speculation, **limits), drafter, InProcessChannel, device)
    outputs = [[] for _ in params]
    try:
        for index, param in enumerate(params):
            engine.add_request(Request(str(index), tuple(ref.prompts[index]), param))
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[int(output.request_id)].append(output)
    finally:
        engine.model.remove_taps()
    return outputs, engine


def tokens(outputs):
    return [token_id for output in outputs for token_id in output.token_ids]


def check(one, root):
    """A round's accepted nodes are a path of its tree, from the last token so far, that spells the round's tokens."""
    assert len(one.tree_token_ids) == len(one.tree_parents) > 1
    assert (one.tree_token_ids[0], one.tree_parents[0]) == (root, -1)
    assert all(0 <= parent < node for node, parent in enumerate(one.tree_parents) if node)
    assert [one.tree_parents[node] for node in one.accepted_nodes] == [0, *one.accepted_nodes][:-1]
    spelled = [one.tree_token_ids[node] for node in one.accepted_nodes]
    assert spelled[: len(one.token_ids)] == list(one.token_ids[: len(spelled)])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("adaptive", "overlap", "graphs"),
    [(False, False, False), (False, True, True), (True, True, True)],
    ids=["eager", "graphs", "pruned-on-the-device"],
)
def test_the_rounds_spell_the_text_along_their_trees(ref, adaptive, overlap, graphs):
    speculation = replace(TREE, adaptive=adaptive)
    device = RecordingDevice() if graphs else None
    outputs, engine = run(
        ref, [greedy_params(NUM_TOKENS, trace=True)] * 4, speculation, device, overlap=overlap, max_num_seqs=4
    )
    num_trees = num_accepted = num_nodes = 0
    for index, mine in enumerate(outputs):
        assert tokens(mine) == ref.continuations[index][:NUM_TOKENS]
        last = ref.prompts[index][-1]
        for output in mine:
            (one,) = output.rounds
            assert one.token_ids == output.token_ids
            if one.tree_parents:
                check(one, last)
                num_trees += 1
                num_accepted += len(one.accepted_nodes)
                num_nodes += len(one.tree_parents) - 1
            else:
                assert len(one.token_ids) == 1
            last = one.token_ids[-1]
    seen = engine.speculation
    assert (num_trees, num_accepted, num_nodes) == (
        seen.num_drafts,
        seen.num_accepted_tokens,
        seen.num_draft_tokens,
    )
    assert num_accepted > 0


def test_requests_beside_one_that_asks_see_nothing(ref):
    quiet, loud = greedy_params(NUM_TOKENS), greedy_params(NUM_TOKENS, trace=True)
    outputs, engine = run(ref, [quiet, loud, quiet])
    assert [tokens(mine) for mine in outputs] == [text[:NUM_TOKENS] for text in ref.continuations[:3]]
    assert [any(output.rounds for output in mine) for mine in outputs] == [False, True, False]
    assert engine.shown._request_ids == set()


def test_without_such_requests_nothing_is_fetched(ref, monkeypatch):
    def refuse(parts):
        raise AssertionError("a tree was fetched for nobody")

    monkeypatch.setattr("wingbeat.runtime.shown_rounds.shown_rounds.Download", refuse)
    outputs, _ = run(ref, [greedy_params(NUM_TOKENS)] * 2)
    assert [tokens(mine) for mine in outputs] == [text[:NUM_TOKENS] for text in ref.continuations[:2]]


def test_a_preempted_request_sees_each_token_once(ref):
    limits = {"max_model_len": 128, "num_kv_blocks": 20, "max_num_batched_tokens": 24}
    outputs, engine = run(ref, [greedy_params(NUM_TOKENS, trace=True)] * 8, **limits)
    assert engine.stats().num_preemptions > 0
    for mine, text in zip(outputs, ref.continuations, strict=True):
        assert tokens(mine) == text[:NUM_TOKENS]
        assert [token for output in mine for one in output.rounds for token in one.token_ids] == tokens(mine)
