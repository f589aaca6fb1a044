"""Grammars written to hold up others: refused, or they end alone and take little."""

import json
import subprocess
import sys

import pytest

from tests.runtime.grammar.world import TOKENIZER, demo_drafter, params_of
from tests.runtime.models import TREE, Run, engine_config, new_engine, reference
from wingbeat.runtime.grammar.compiler import Grammars
from wingbeat.runtime.grammar.grammar_masker import MASK_S, MOST_AT_ONCE_S, GrammarMasker
from wingbeat.runtime.grammar.trial import GrammarTrial
from wingbeat.runtime.scheduling.request import FinishReason, Request, SamplingParams

from .grammar_bombs import BOMBS, EMPTY, EMPTY_LATER, ENDLESS, spec_of

PROMPTS = [TOKENIZER.encode(text) for text in ("import os\n", "class Stack:\n")]
LENGTH = 40
MOST_CALL_S = 0.5
"""CPU time of one call into llguidance, by its own bounds: a Lark grammar of 1,500 rules at one place."""


@pytest.fixture(scope="module")
def loaded():
    return reference("demo", 1).loaded


@pytest.fixture(scope="module")
def grammars(loaded):
    return Grammars(TOKENIZER, loaded.vocab_size, loaded.eos_token_ids)


@pytest.fixture(scope="module")
def trial(grammars):
    made = GrammarTrial(grammars)
    yield made
    made.close()


class Beside(Run):
    """Requests without grammars, and others with one."""

    def __init__(self, engine, grammars, specs, max_tokens=LENGTH, **fields):
        self.engine, self.failures = engine, {}
        params = [SamplingParams(LENGTH, 0.0)] * len(PROMPTS)
        for index, (prompt, param) in enumerate(zip(PROMPTS, params, strict=True)):
            engine.add_request(Request(str(index), tuple(prompt), param))
        for index, spec in enumerate(specs, len(PROMPTS)):
            param = params_of(spec, 1, 1.0, max_tokens, **fields)
            engine.add_request(Request(str(index), tuple(PROMPTS[0]), param), grammars.compile(spec))
        self.tokens, self.last = [[] for _ in range(len(PROMPTS) + len(specs))], {}

    def step(self):
        for output in self.engine.step():
            index = int(output.request_id)
            self.tokens[index] += output.token_ids
            if output.finish_reason is not None:
                self.last[index] = output
            if output.failure is not None:
                self.failures[index] = output


@pytest.fixture
def spent(monkeypatch):
    """CPU seconds of each mask and token of the texts themselves."""
    seconds, spend = [], GrammarMasker._spend
    monkeypatch.setattr(GrammarMasker, "_spend", lambda self, taken: (seconds.append(taken), spend(self, taken)))
    return seconds


def run_beside(loaded, grammars, specs, drafter=None, **fields):
    engine = new_engine(loaded, engine_config(TREE, max_model_len=1024, num_kv_blocks=600), drafter)
    try:
        run = Beside(engine, grammars, specs, **fields)
        run.finish()
        engine.check_integrity()
    finally:
        engine.model.remove_taps()
    return run


@pytest.fixture(scope="module")
def undisturbed(loaded, grammars):
    return run_beside(loaded, grammars, []).tokens


def check_bounds(run, undisturbed, spent, num_bombs=1):
    """Others have their texts, and what the grammars took is within what they may take."""
    assert run.tokens[: len(PROMPTS)] == undisturbed
    for failed in run.failures.values():
        assert failed.is_refusal
        assert failed.failure.startswith("structured_outputs.")
    num_tokens = sum(map(len, run.tokens[len(PROMPTS) :]))
    assert sum(spent) < num_bombs * (2 * MOST_CALL_S + MOST_AT_ONCE_S) + 2 * MASK_S * num_tokens


@pytest.mark.slow
def test_what_bystanders_wait_is_measured_beside_every_bomb(tmp_path):
    command = [sys.executable, "-m", "tests.hostile.bystander_times", "--quick", "--output", tmp_path / "times.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "times.json").read_text())
    tried = {f"{name}, tried out first" for name in BOMBS}
    assert {row["beside"] for row in report["rows"]} == {"none", "json", "regex", *BOMBS, *tried} - ENDLESS
    assert report["compared"] > report["differing"] == 0


def is_let_in(check, name):
    """Whether a bomb is let in; where it is not, the refusal names its field."""
    try:
        check(BOMBS[name])
    except ValueError as error:
        refusal = str(error)
    else:
        return True
    assert refusal.startswith(f"{BOMBS[name].field} ")
    return False


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [name for name in BOMBS if name not in ENDLESS])
def test_a_bomb_is_refused_or_ends_alone_and_takes_little(loaded, grammars, trial, undisturbed, spent, name):
    if not is_let_in(trial.check, name):
        return
    run = run_beside(loaded, grammars, [BOMBS[name]])
    check_bounds(run, undisturbed, spent)
    if 2 not in run.failures:
        assert run.last[2].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(BOMBS) - ENDLESS))
def test_a_bomb_that_was_not_tried_out_is_bounded_for_long(loaded, grammars, undisturbed, spent, name):
    if not is_let_in(grammars.compile, name):
        return
    run = run_beside(loaded, grammars, [BOMBS[name]] * 2, demo_drafter(TREE), max_tokens=800)
    check_bounds(run, undisturbed, spent, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sorted(ENDLESS))
def test_an_endless_compilation_ends_with_its_process_and_others_are_tried_meanwhile(trial, name):
    assert not is_let_in(trial.check, name)
    trial.check(spec_of("regex", f"{name}?"))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [*EMPTY, *EMPTY_LATER])
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_where_nothing_is_allowed_the_answer_ends_by_length(loaded, grammars, undisturbed, spent, name, drafted):
    spec = {**EMPTY, **EMPTY_LATER}[name]
    run = run_beside(loaded, grammars, [spec], demo_drafter(TREE) if drafted else None)
    check_bounds(run, undisturbed, spent)
    assert not run.failures
    assert run.last[2].finish_reason is FinishReason.LENGTH
    assert TOKENIZER.decode(run.tokens[2]) == ("" if name in EMPTY else TOKENIZER.decode(run.tokens[2]))
    assert len(run.tokens[2]) < LENGTH


def test_the_trial_refuses_what_is_empty(trial):
    for spec in EMPTY.values():
        with pytest.raises(ValueError, match=rf"^{spec.field} (matches no text|cannot be compiled)"):
            trial.check(spec)
    trial.check(BOMBS["certain for ever"])


@pytest.mark.slow
def test_the_trial_refuses_what_is_dear(trial):
    with pytest.raises(ValueError, match=r"^structured_outputs\.grammar takes more computing"):
        trial.check(BOMBS["wide, in Lark"])
