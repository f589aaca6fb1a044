"""Grammars are tried out elsewhere: an endless one is refused within its limits, and stops nothing."""

import threading
import time

import pytest

from tests.runtime.small_tokenizers import byte_level_tokenizer
from wingbeat.runtime.grammar.compiler import Grammars
from wingbeat.runtime.grammar.trial import GrammarTrial
from wingbeat.runtime.scheduling.request import GrammarSpec

BOMB = GrammarSpec("regex", "[a-z]?" * 3000, "structured_outputs.regex")


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
def test_what_compiles_passes(trial, spec):
    trial.check(spec)


def test_what_does_not_compile_is_refused_with_the_reason(trial):
    with pytest.raises(ValueError, match=r"structured_outputs\.regex cannot be compiled: .+"):
        trial.check(spec_of("regex", "("))


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
    assert problems == ["structured_outputs.regex takes more than 1 s or 256 MiB to compile"]


@pytest.mark.slow
def test_a_process_that_died_is_replaced(trial):
    trial.check(spec_of("regex", "first"))
    trial._process.kill()
    trial._process.wait()
    trial.check(spec_of("regex", "second"))


def test_a_process_that_was_started_ahead_answers_at_once():
    made = GrammarTrial(Grammars(byte_level_tokenizer(), 4096, frozenset([0])), cpu_s=1, memory_bytes=2**28)
    try:
        made.warm()
        started = made._process
        made.check(spec_of("regex", "[a-c]+x"))
        assert made._process is started
    finally:
        made.close()
    with pytest.raises(ValueError, match="the engine ends"):
        made.check(spec_of("regex", "[a-c]+y"))
    assert started.poll() is not None


def test_nobody_waits_for_a_process_that_starts_where_it_is_to_end():
    made = GrammarTrial(Grammars(byte_level_tokenizer(), 4096, frozenset([0])))
    made._grammars.tokenizer_info  # noqa: B018 - imported, so that the process itself is what starts
    starting = threading.Thread(target=made.warm)
    starting.start()
    while made._process is None:
        time.sleep(0.001)
    begun = time.monotonic()
    made.close()
    starting.join()
    assert time.monotonic() - begun < 5
    assert made._process.poll() is not None
