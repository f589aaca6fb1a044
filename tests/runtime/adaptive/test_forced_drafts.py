"""A request may force drafts where they do not pay: it alone gets them, and no text changes."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.runtime.adaptive.losing_policy import POLICY, LosingPolicy
from tests.runtime.models import TREE, engine_config, greedy_params, new_engine
from tests.runtime.recorded_graphs import RecordingDevice
from tests.runtime.scripted import ScriptedDrafter, random_tree, right_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import Request, SamplingParams

NUM_TOKENS = 48
ADAPTIVE = replace(TREE, adaptive=True)


def run(ref, params, plan=random_tree, device=None, texts=None, **limits):
    """Serve requests; return the rounds of each, and the engine. `texts` replace the greedy texts that are drafted."""
    drafter = ScriptedDrafter(texts or ref.sequences, plan, ref.loaded.vocab_size)
    engine = build_engine(ref.loaded, engine_config(ADAPTIVE, **limits), drafter, InProcessChannel, device)
    rounds = [[] for _ in params]
    try:
        for index, param in enumerate(params):
            engine.add_request(Request(str(index), tuple(ref.prompts[index]), param))
        while engine.has_unfinished_requests():
            for output in engine.step():
                rounds[int(output.request_id)].extend(output.rounds)
    finally:
        engine.model.remove_taps()
    return rounds, engine


def tokens(rounds):
    return [token_id for one in rounds for token_id in one.token_ids]


@pytest.mark.few(1)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_who_asks_is_drafted_for_and_nobody_else(ref, monkeypatch, graphs):
    monkeypatch.setattr(POLICY, LosingPolicy)
    quiet = greedy_params(NUM_TOKENS, trace=True)
    loud = replace(quiet, force_drafts=True)
    device = RecordingDevice() if graphs else None
    rounds, engine = run(ref, [quiet, loud, quiet], right_tree, device, overlap=graphs, max_num_seqs=4)
    assert [tokens(mine) for mine in rounds] == [text[:NUM_TOKENS] for text in ref.continuations[:3]]
    first, forced, second = [[bool(one.tree_parents) for one in mine] for mine in rounds]
    assert sum(forced) >= len(forced) - 4, "the first tokens, and what the last ones leave no room for, have no draft"
    assert len(forced) < NUM_TOKENS / 2
    assert {one.plain_reason for one in rounds[1] if not one.tree_parents} <= {"prompt", "idle", "not_usable"}
    probes = engine.stats().policy.decisions["probe_draft"]
    assert sum(first) + sum(second) <= 2 * probes < 12
    assert engine.stats().policy.decisions["forced"] >= sum(forced) - probes


def test_without_them_such_an_engine_decodes_plainly_and_says_why(ref, monkeypatch):
    monkeypatch.setattr(POLICY, LosingPolicy)
    ((mine,), _) = run(ref, [greedy_params(NUM_TOKENS, trace=True)])
    assert tokens(mine) == ref.continuations[0][:NUM_TOKENS]
    assert all(bool(one.tree_parents) != bool(one.plain_reason) for one in mine)
    reasons = Counter(one.plain_reason for one in mine if one.plain_reason)
    assert mine[0].plain_reason == "prompt"
    assert reasons.most_common(1)[0][0] == "plain"
    assert set(reasons) <= {"prompt", "plain", "idle"}


def test_a_sampled_text_is_the_same(ref, monkeypatch):
    monkeypatch.setattr(POLICY, LosingPolicy)
    drawn = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=11, trace=True, ignore_eos=True)
    plain, _ = run(ref, [replace(drawn, speculation=False)] * 4)
    texts = [[*prompt, *tokens(mine)] for prompt, mine in zip(ref.prompts, plain, strict=False)]
    forced, engine = run(ref, [replace(drawn, force_drafts=True)] * 4, texts=texts)
    assert [tokens(mine) for mine in forced] == [tokens(mine) for mine in plain]
    assert engine.speculation.num_accepted_tokens > 0
    assert {one.plain_reason for mine in plain for one in mine} == {"prompt", "not_asked"}


def test_a_request_whose_trees_are_not_drawn_is_told_why(ref):
    fixed = engine_config(TREE)
    alone = new_engine(ref.loaded, fixed, None)
    alone.add_request(Request("0", tuple(ref.prompts[0]), greedy_params(4, trace=True)))
    reasons = []
    while alone.has_unfinished_requests():
        reasons += [one.plain_reason for output in alone.step() for one in output.rounds]
    alone.model.remove_taps()
    assert reasons == ["prompt", *["no_drafter"] * 3]
