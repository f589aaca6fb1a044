"""Grammars are compiled beside an engine's rounds: who has none waits for nobody's."""

import asyncio
import threading
from dataclasses import replace

import pytest

from tests.deployments.pool_world import collect, make_request, run, tokens
from tests.fakes import FakeEngine, expected_tokens, wait_until
from wingbeat.deployments.api.errors import as_api_error
from wingbeat.deployments.fleet.interface import RequestRefused
from wingbeat.runtime.scheduling.request import GrammarSpec


class SlowGrammars:
    """Compiles when it is told to."""

    def __init__(self):
        self.begun, self.go_on = threading.Event(), threading.Event()

    def compile(self, spec):
        if spec.text == "bad":
            raise ValueError(f"{spec.field} cannot be compiled: it is bad")
        self.begun.set()
        assert self.go_on.wait(10)
        return "compiled"


class CompilingEngine(FakeEngine):
    """Keeps what it was given as grammars."""

    def __init__(self, *args):
        super().__init__(*args)
        self.grammars, self.given = SlowGrammars(), []

    def add_request(self, request, grammar=None):
        self.given.append(grammar)
        super().add_request(request, grammar)


def constrained(text, name="constrained"):
    request = make_request(name)
    return replace(request, params=replace(request.params, grammar=GrammarSpec("regex", text, "response_format")))


def test_others_go_on_while_a_grammar_is_compiled():
    async def scenario(source, pool):
        engine = source.engines["a"]
        waiting = asyncio.create_task(collect(pool, constrained("good")))
        await asyncio.to_thread(engine.grammars.begun.wait, 10)
        assert tokens(await collect(pool, make_request("other"))) == expected_tokens((1, 2, 3), 7, 20)
        assert engine.given == [None]
        engine.grammars.go_on.set()
        assert tokens(await waiting) == expected_tokens((1, 2, 3), 7, 20)
        assert engine.given == [None, "compiled"]

    run(scenario, "a", engine=CompilingEngine)


def test_what_is_no_grammar_is_the_clients_error_and_names_the_field():
    async def scenario(source, pool):
        with pytest.raises(RequestRefused) as caught:
            await collect(pool, constrained("bad"))
        error = as_api_error(caught.value)
        assert (error.status, error.param, error.code) == (400, "response_format", "invalid_value")
        assert tokens(await collect(pool, make_request("other"))) == expected_tokens((1, 2, 3), 7, 20)

    run(scenario, "a", engine=CompilingEngine)


def test_a_client_that_leaves_before_its_grammar_is_compiled_leaves_nothing_behind():
    async def scenario(source, pool):
        engine, loop = source.engines["a"], source.loops["a"]
        waiting = asyncio.create_task(collect(pool, constrained("good")))
        await asyncio.to_thread(engine.grammars.begun.wait, 10)
        waiting.cancel()
        await asyncio.to_thread(wait_until, lambda: loop.num_requests == 0)
        engine.grammars.go_on.set()
        assert tokens(await collect(pool, make_request("other"))) == expected_tokens((1, 2, 3), 7, 20)
        assert engine.given == [None]

    run(scenario, "a", engine=CompilingEngine)


def test_an_engine_without_a_tokenizer_refuses_grammars():
    async def scenario(source, pool):
        with pytest.raises(RequestRefused, match="no tokenizer"):
            await collect(pool, constrained("good"))

    run(scenario, "a")
