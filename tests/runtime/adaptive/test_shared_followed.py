"""A drafter that two engines share catches up with the requests of both, once drafts win."""

from dataclasses import replace

import pytest

from tests.runtime.adaptive.losing_policy import POLICY, SwitchedPolicy
from tests.runtime.adaptive.test_followed_requests import ONE_OF, SURE
from tests.runtime.models import TREE, Run, eagle_drafter, engine_config, greedy_params, reference
from tests.runtime.shared_drafter import Verifier, run_all
from wingbeat.runtime.adaptive import adaptive_speculation
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.shared_drafters.shared_worker import SharedWorker

pytestmark = pytest.mark.usefixtures("known_costs")


@pytest.mark.slow
def test_a_drafter_that_two_engines_share_catches_up_with_both(monkeypatch):
    monkeypatch.setattr(POLICY, SwitchedPolicy)
    monkeypatch.setattr(SwitchedPolicy, "wins", False)
    monkeypatch.setattr(adaptive_speculation, "SURE", SURE)
    monkeypatch.setattr(adaptive_speculation, "ONE_OF", ONE_OF)
    ref, speculation = reference("llama"), replace(TREE, adaptive=True)
    length = min(map(len, ref.continuations))
    worker = SharedWorker(DraftWorker(eagle_drafter(ref.loaded, speculation)))
    both = [Verifier(ref.loaded, engine_config(speculation), worker, name, ref.prompts[:1]) for name in "ab"]
    run_all(both)
    for one in both:
        one.run = Run(one.engine, ref.prompts, greedy_params(length))
        while sum(map(bool, one.run.tokens)) < 3:
            one.run.step()
        assert sum(seq.draft.followed for seq in one.engine.scheduler.running) <= 1
    monkeypatch.setattr(SwitchedPolicy, "wins", True)
    run_all(both)
    for one in both:
        assert one.run.tokens == [text[:length] for text in ref.continuations]
        drafted_for = sum(output.metrics.num_drafts > 0 for output in one.run.last.values())
        assert drafted_for >= len(ref.prompts) - 1, "the last one to be told may end before"
        one.close()
