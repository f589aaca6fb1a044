"""Tokens that a grammar forces are drafted without a drafter's tree in a CPU's round, wherever that pays."""

from dataclasses import replace

import pytest

from tests.runtime.adaptive.losing_policy import POLICY, know_costs
from tests.runtime.grammar.world import SPECS, TOKENIZER, Constrained, demo_drafter, generate, params_of
from tests.runtime.models import CHAIN, TREE, engine_config, new_engine
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.adaptive.curves import PassCurve
from wingbeat.runtime.adaptive.policy import SpeculationPolicy
from wingbeat.runtime.engine.speculation import DraftPlan, Reason
from wingbeat.runtime.scheduling.request import GrammarSpec

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
SENTENCE = GrammarSpec("choice", '["a long sentence that has only one way to go on once it has begun"]')


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_certain_tokens_are_drafted_without_a_drafter(loaded, grammars, temperature):
    """Requests without speculation and requests with nothing forced are in the same batch."""
    prompts = [TOKENIZER.encode("#")] * 3
    params = [params_of(SENTENCE, 1, temperature), params_of(SENTENCE, 2, temperature, speculation=False)]
    params.append(params_of(SPECS[1], 3, temperature))
    plain, _ = generate(loaded, grammars, prompts, params)
    for shape in (CHAIN, TREE):
        engine = new_engine(loaded, engine_config(shape, max_model_len=512, num_kv_blocks=300))
        try:
            run = Constrained(engine, grammars, prompts, params)
            assert run.finish() == plain
        finally:
            engine.model.remove_taps()
        assert run.last[0].metrics.acceptance_length > 1.5
        assert run.last[1].metrics.num_drafts == 0
        engine.check_integrity()


def test_certain_tokens_of_an_answer_that_may_have_few_more_are_not_drafted(loaded, grammars):
    prompt = TOKENIZER.encode("#")
    for most in (1, 2, 3):
        params = params_of(SENTENCE, temperature=0.0, max_tokens=most)
        plain, _ = generate(loaded, grammars, [prompt], [params])
        engine = new_engine(loaded, engine_config(TREE, max_model_len=512, num_kv_blocks=300))
        try:
            run = Constrained(engine, grammars, [prompt], [params])
            assert run.finish() == plain
        finally:
            engine.model.remove_taps()
        assert run.last[0].metrics.num_draft_tokens <= most - 1


class Plain(SpeculationPolicy):
    """A policy that never requests a tree."""

    reason = Reason.PLAIN

    def _plan(self, *load):
        self._token_s = 1e-3, 1e-3
        return DraftPlan(0, self.reason)


class ProbesPlain(Plain):
    reason = Reason.PROBE_PLAIN


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "row_s", "is_drafted"),
    [(Plain, 1e-5, True), (Plain, 2e-3, False), (ProbesPlain, 1e-5, False)],
    ids=["cheap", "dear", "probed"],
)
def test_plain_rounds_draft_what_is_certain_where_that_pays(loaded, grammars, monkeypatch, policy, row_s, is_drafted):
    """A token is worth 1 ms here, and a verified row costs less or more than that."""
    know_costs(monkeypatch, PassCurve((1, 9), (1e-3, 1e-3 + 8 * row_s)))
    monkeypatch.setattr(POLICY, policy)
    prompt, params = TOKENIZER.encode("import json"), params_of(SENTENCE)
    plain, _ = generate(loaded, grammars, [prompt], [params])
    shape = replace(TREE, adaptive=True)
    tokens, run = generate(loaded, grammars, [prompt], [params], demo_drafter(shape), shape)
    assert tokens == plain
    assert (run.last[0].metrics.num_accepted_tokens > 5) == is_drafted
    assert bool(run.last[0].metrics.num_drafts) == is_drafted
    assert run.engine.stats().plain_rounds.get(str(policy.reason), 0) > 0 or is_drafted
    # Tokens that the grammar forces are no evidence of the drafter's acceptance.
    assert run.engine.stats().policy.num_accepted == 0
