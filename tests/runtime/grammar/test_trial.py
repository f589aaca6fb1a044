"""Grammars are tried in another process: an endless one is refused within its limits, and stops no round."""

import contextlib
import json
import os
import signal
import threading
import time

import pytest

from tests.runtime.small_tokenizers import byte_level_tokenizer
from wingbeat.runtime.grammar import compiler
from wingbeat.runtime.grammar.compiler import Grammars, lark_of_spec
from wingbeat.runtime.grammar.trial import CHEAP_KINDS, GrammarTrial
from wingbeat.runtime.scheduling.request import GrammarSpec

BOMB = GrammarSpec(
    "json",
    json.dumps({"allOf": [{"type": "string", "pattern": f"[ab]*a[ab]{{{10 + count}}}"} for count in range(20)]}),
    "structured_outputs.json",
)
"""A grammar whose alternatives, all required at once, have more than a million beginnings."""


TEXTS = {"regex": "ax", "json": "{", "grammar": "ba", "choice": "b"}


def spec_of(kind, text):
    return GrammarSpec(kind, text, f"structured_outputs.{kind}")


@pytest.fixture(scope="module")
def trial():
    made = GrammarTrial(Grammars(byte_level_tokenizer(), 4096, frozenset([0])), cpu_s=1, memory_bytes=2**28)
    yield made
    made.close()


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("regex", "[a-c]+x"),
        spec_of("json", '{"type": "object", "properties": {"a": {"type": "string"}}}'),
        spec_of("grammar", 'root ::= "a" | "b" root'),
        spec_of("choice", '["a", "b"]'),
    ],
    ids=lambda spec: spec.kind,
)
def test_what_compiles_passes_and_is_not_made_again_beside_the_rounds(trial, spec, monkeypatch):
    """Conversion to Lark holds Python's lock and would block an engine's rounds: the other process converts."""
    vocabulary = trial.grammars.vocabulary()
    expected, lark = lark_of_spec(vocabulary, spec), trial.check(spec)
    assert lark == (None if spec.kind in CHEAP_KINDS else expected)
    monkeypatch.setattr(compiler, "lark_of_spec", lambda *_: pytest.fail("made again"))
    for _ in range(2):
        made = trial.grammars.compile(spec, expected) if lark is None else trial.compile(spec)
        assert made.matcher().try_consume_tokens(byte_level_tokenizer().encode(TEXTS[spec.kind])) > 0


def test_what_does_not_compile_is_refused_with_the_reason(trial):
    with pytest.raises(ValueError, match=r"structured_outputs\.regex cannot be compiled: .+"):
        trial.check(spec_of("regex", "("))


@pytest.mark.slow
def test_an_endless_compile_is_refused_while_others_pass(trial):
    problems = []

    def check_bomb():
        try:
            trial.check(BOMB)
        except ValueError as error:
            problems.append(str(error))

    thread = threading.Thread(target=check_bomb)
    thread.start()
    trial.check(spec_of("regex", "[x-z]{2}"))
    assert not problems
    thread.join()
    assert problems == ["structured_outputs.json takes more than 1 s or 256 MiB to compile"]


def children_of(process_id):
    try:
        with open(f"/proc/{process_id}/task/{process_id}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


@pytest.mark.slow
def test_a_process_that_dies_under_grammars_is_replaced_and_they_are_tried_again(trial):
    failed, processes = [], set()

    def check(number):
        try:
            trial.check(spec_of("regex", f"[a-z]{{{number}}}"))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=check, args=(number,)) for number in range(1, 17)]
    trial.warm()
    for thread in threads:
        thread.start()
    while len(processes) < 3 and any(thread.is_alive() for thread in threads):
        process = trial.process
        # Processes that replace the killed one are killed as well, once they have work.
        if process is not None and process.poll() is None and children_of(process.pid):
            processes.add(process)
            process.kill()
    for thread in threads:
        thread.join()
    assert processes
    assert not failed


def test_a_trial_that_is_ended_from_outside_is_done_again_and_says_nothing_of_its_grammar(trial):
    """Killed are, in turn, both processes of a trial: the process that computes, and the process that waits for it."""
    slow = spec_of("json", json.dumps({"allOf": [{"pattern": f"[ab]*a[ab]{{{n + 5}}}"} for n in range(11)]}))
    for depth in (1, 2):
        trial.check(spec_of("regex", f"[a-z]{{{depth}}}x"))
        trial._known.clear()
        verdicts = []

        def check(verdicts=verdicts):
            try:
                trial.check(slow)
            except ValueError as error:
                verdicts.append(str(error))

        thread = threading.Thread(target=check)
        thread.start()
        found = []
        while not found and thread.is_alive():
            found = children_of(trial.process.pid)
            if depth == 2 and found:
                found = children_of(found[0])
        for process_id in found:
            with contextlib.suppress(ProcessLookupError):  # the process may have ended by itself since
                os.kill(process_id, signal.SIGKILL)
        thread.join()
        assert not verdicts or "takes more than" not in verdicts[0]


def test_a_process_that_was_started_ahead_answers_at_once():
    made = GrammarTrial(Grammars(byte_level_tokenizer(), 4096, frozenset([0])), cpu_s=1, memory_bytes=2**28)
    try:
        made.warm()
        started = made.process
        made.check(spec_of("regex", "[a-c]+x"))
        assert made.process is started
    finally:
        made.close()
    with pytest.raises(ValueError, match="the engine is shutting down"):
        made.check(spec_of("regex", "[a-c]+y"))
    assert started.poll() is not None


def test_nobody_waits_for_a_process_that_starts_where_it_is_to_end():
    made = GrammarTrial(Grammars(byte_level_tokenizer(), 4096, frozenset([0])))
    made.grammars.vocabulary()  # modules are imported, so that the start of the process itself is measured
    starting = threading.Thread(target=made.warm)
    starting.start()
    while made.process is None:
        time.sleep(0.001)
    begun = time.monotonic()
    made.close()
    starting.join()
    assert time.monotonic() - begun < 5
    assert made.process.poll() is not None
