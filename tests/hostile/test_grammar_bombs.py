"""Grammars written to hold up others, in an engine that has not tried them out: they end alone and cost little."""

import gc
import json
import subprocess
import sys
import time

import pytest

from tests.runtime.grammar_world import TOKENIZER, demo_drafter, params_of
from tests.runtime.models import TREE, Run, engine_config, new_engine, reference
from wingbeat.runtime.grammar import budget
from wingbeat.runtime.grammar.bounded_calls import MOST_CALL_S, BoundedCalls, TookTooLong
from wingbeat.runtime.grammar.compiler import Grammars
from wingbeat.runtime.grammar.grammar_masker import MOST_TREE_S
from wingbeat.runtime.grammar.trial import GrammarTrial
from wingbeat.runtime.scheduling.request import FinishReason, Request, SamplingParams

from .grammar_bombs import BOMBS, EMPTY, EMPTY_LATER, many_rules, spec_of

PROMPTS = [TOKENIZER.encode(text) for text in ("import os\n", "class Stack:\n")]
LENGTH = 40
DEAR = spec_of("grammar", many_rules(1500, '"zz"'))
"""Its first masks pass, and then a single one takes a third of a second."""


@pytest.fixture(scope="module")
def loaded():
    return reference("demo", 1).loaded


@pytest.fixture(scope="module")
def grammars(loaded):
    return Grammars(TOKENIZER, loaded.vocab_size, loaded.eos_token_ids)


class Timed(BoundedCalls):
    """Adds up what calls took, and what was waited for those that were given up."""

    def __init__(self):
        super().__init__()
        self.spent_s, self.num_given_up = 0.0, 0

    def run(self, work, *args):
        try:
            called = super().run(work, *args)
        except TookTooLong:
            self.spent_s += MOST_CALL_S
            self.num_given_up += 1
            raise
        self.spent_s += called.cpu_s
        return called


class Beside(Run):
    """Requests without grammars, and others with one; keeps every round's CPU time in grammars."""

    def __init__(self, engine, grammars, specs, calls, max_tokens=LENGTH, **fields):
        self.engine, self.calls, self.rounds = engine, calls, []
        self.failures = {}
        params = [SamplingParams(LENGTH, 0.0)] * len(PROMPTS)
        requests = [
            Request(str(index), tuple(prompt), param)
            for index, (prompt, param) in enumerate(zip(PROMPTS, params, strict=True))
        ]
        for request in requests:
            engine.add_request(request)
        for index, spec in enumerate(specs, len(requests)):
            param = params_of(spec, 1, 1.0, max_tokens, **fields)
            grammar = grammars.compile(spec)._replace(calls=calls)
            engine.add_request(Request(str(index), tuple(PROMPTS[0]), param), grammar)
        self.tokens, self.last = [[] for _ in range(len(requests) + len(specs))], {}

    def step(self):
        before = self.calls.spent_s
        for output in self.engine.step():
            index = int(output.request_id)
            self.tokens[index] += output.token_ids
            if output.finish_reason is not None:
                self.last[index] = output
            if output.failure is not None:
                self.failures[index] = output
        self.rounds.append(self.calls.spent_s - before)


def run_beside(loaded, grammars, specs, drafter=None, **fields):
    calls = Timed()
    engine = new_engine(loaded, engine_config(TREE, max_model_len=1024, num_kv_blocks=600), drafter)
    try:
        run = Beside(engine, grammars, specs, calls, **fields)
        run.finish()
        engine.check_integrity()
    finally:
        engine.model.remove_taps()
    return run


@pytest.fixture(scope="module")
def undisturbed(loaded, grammars):
    return run_beside(loaded, grammars, []).tokens


def check_bounds(run, undisturbed, num_bombs=1):
    """Others have their texts, and the rounds' time in grammars is within what they may take."""
    assert run.tokens[: len(PROMPTS)] == undisturbed
    for failed in run.failures.values():
        assert failed.is_refusal
        assert failed.failure.startswith("structured_outputs.")
    # One call that was given up, with what the others may take at once, and a tree.
    most = MOST_CALL_S + budget.MOST_AT_ONCE_S + 2 * MOST_TREE_S
    assert max(run.rounds) < num_bombs * 2 * most
    per_round = budget.MASK_S + budget.PARSE_S + MOST_TREE_S
    in_all = MOST_CALL_S + budget.MOST_AT_ONCE_S + budget.MOST_PARSING_S + 0.1
    assert sum(run.rounds) < num_bombs * 2 * (in_all + per_round * len(run.rounds))


@pytest.mark.slow
def test_what_bystanders_wait_is_measured_beside_every_bomb(tmp_path):
    command = [sys.executable, "-m", "tests.hostile.bystander_times", "--quick", "--output", tmp_path / "times.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "times.json").read_text())
    tried = {f"{name}, tried out first" for name in BOMBS}
    assert {row["beside"] for row in report["rows"]} == {"none", "json", "regex", *BOMBS, *tried}
    assert report["compared"] > report["differing"] == 0


@pytest.mark.few(8)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_alone_and_takes_little(loaded, grammars, undisturbed, name):
    run = run_beside(loaded, grammars, [BOMBS[name]])
    check_bounds(run, undisturbed)
    if 2 not in run.failures:
        assert run.last[2].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_that_runs_for_long_is_bounded(loaded, undisturbed, name):
    """By grammars of its own: those that found a bomb dear before refuse it when it is compiled."""
    grammars = Grammars(TOKENIZER, loaded.vocab_size, loaded.eos_token_ids)
    run = run_beside(loaded, grammars, [BOMBS[name]] * 2, demo_drafter(TREE), max_tokens=800)
    check_bounds(run, undisturbed, 2)


def test_a_step_that_takes_too_long_is_given_up_once_for_all_choices(loaded, undisturbed):
    grammars = Grammars(TOKENIZER, loaded.vocab_size, loaded.eos_token_ids)
    run = run_beside(loaded, grammars, [DEAR] * 4)
    check_bounds(run, undisturbed)
    assert run.calls.num_given_up == 1
    assert sorted(run.failures) == [2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"^structured_outputs\.grammar takes more computing"):
        grammars.compile(DEAR)


def test_a_call_that_goes_on_for_ever_is_told_of():
    told, go_on = [], [True]
    calls = BoundedCalls(0.01, told.append)

    def work():
        while go_on:
            pass

    with pytest.raises(TookTooLong):
        calls.run(work)
    assert calls.run(int).value == 0
    until = time.monotonic() + 60
    while not told and time.monotonic() < until:
        time.sleep(0.01)
    go_on.clear()
    assert len(told) == 1


@pytest.mark.parametrize("name", [*EMPTY, *EMPTY_LATER])
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_where_nothing_is_allowed_the_answer_ends_by_length(loaded, grammars, undisturbed, name, drafted):
    spec = {**EMPTY, **EMPTY_LATER}[name]
    run = run_beside(loaded, grammars, [spec], demo_drafter(TREE) if drafted else None)
    check_bounds(run, undisturbed)
    assert not run.failures
    assert run.last[2].finish_reason is FinishReason.LENGTH
    assert TOKENIZER.decode(run.tokens[2]) == ("" if name in EMPTY else TOKENIZER.decode(run.tokens[2]))
    assert len(run.tokens[2]) < LENGTH


def test_requests_that_wait_their_turn_share_one_memory_of_parsers(loaded, undisturbed, monkeypatch):
    """Each is within its own bounds, and all together are not."""
    monkeypatch.setattr(budget, "MOST_PARSING_OF_ALL_S", 0.02)
    monkeypatch.setattr(budget, "MOST_SHARE_S", 0.004)
    monkeypatch.setattr(budget, "PARSE_S", 1.0)
    grammars = Grammars(TOKENIZER, loaded.vocab_size, loaded.eos_token_ids)
    run = run_beside(loaded, grammars, [BOMBS["ambiguous sums"]] * 3, max_tokens=200, min_tokens=200)
    assert run.tokens[: len(PROMPTS)] == undisturbed
    assert run.failures
    del run
    gc.collect()
    assert grammars._parsing_of_all.held_s == pytest.approx(0)


def test_the_trial_refuses_what_is_empty_or_dear(loaded, grammars):
    trial = GrammarTrial(grammars)
    try:
        for spec in EMPTY.values():
            with pytest.raises(ValueError, match=rf"^{spec.field} (matches no text|cannot be compiled)"):
                trial.check(spec)
        for name in ("wide", "counted twice", "overlapping", "repeats of nothing"):
            with pytest.raises(ValueError, match=rf"^{BOMBS[name].field} takes more"):
                trial.check(BOMBS[name])
        trial.check(BOMBS["certain for ever"])
    finally:
        trial.close()
