"""Requests that the drafter follows late, with every kind of drafter: no token changes."""

from dataclasses import replace

import pytest

from tests.runtime.adaptive.losing_policy import POLICY, SwitchedPolicy
from tests.runtime.engine.test_drafter_kinds_lossless import PROPOSING, SHORT, kind, sampled_params
from tests.runtime.models import TREE, Run, engine_config, greedy_params, new_engine
from wingbeat.runtime.adaptive import adaptive_speculation

__all__ = ["kind"]


@pytest.mark.usefixtures("known_costs")
def test_requests_that_are_followed_late_have_the_text_of_plain_decoding(kind, monkeypatch, request):
    monkeypatch.setattr(POLICY, SwitchedPolicy)
    monkeypatch.setattr(SwitchedPolicy, "wins", False)
    monkeypatch.setattr(adaptive_speculation, "SURE", 16)
    speculation = replace(TREE, adaptive=True)
    drafter = kind.drafter(speculation)
    engine = new_engine(kind.ref.loaded, engine_config(speculation), drafter)
    greedy = Run(engine, kind.ref.prompts[:2], greedy_params(SHORT))
    while engine.has_unfinished_requests():
        greedy.step()
    assert greedy.tokens == kind.greedy[:2]
    run = Run(engine, kind.ref.prompts, sampled_params())
    while sum(map(bool, run.tokens)) < 4:
        run.step()
    followed = [seq.draft.followed for seq in engine.scheduler.running]
    assert all(followed) != drafter.needs.keeps_context
    monkeypatch.setattr(SwitchedPolicy, "wins", True)
    while engine.has_unfinished_requests():
        run.step()
    assert run.tokens == kind.sampled
    if request.node.callspec.params["kind"] in PROPOSING:
        assert all(output.metrics.num_drafts > 0 for output in run.last.values())
    engine.check_integrity()
    engine.model.remove_taps()
