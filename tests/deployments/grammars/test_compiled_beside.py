"""Grammars are compiled beside an engine's rounds: requests without a grammar do not wait for them."""

import asyncio
import threading
from dataclasses import replace

import pytest

from tests.deployments.pool_world import collect, make_request, run, tokens
from tests.fakes import FakeEngine, expected_tokens, wait_until
from wingbeat.deployments.api.errors import as_api_error
from wingbeat.deployments.fleet.interface import RequestRefused
from wingbeat.runtime.scheduling.request import FinishReason, GrammarSpec, RequestOutput


class SlowGrammars:
    """A compiler that signals its start and compiles on command."""

    def __init__(self):
        self.warmed, self.begun, self.go_on = threading.Event(), threading.Event(), threading.Event()

    def warm(self):
        self.warmed.set()

    def close(self):
        pass

    def compile(self, spec):
        assert self.warmed.wait(10)
        if spec.text == "bad":
            raise ValueError(f"{spec.field} cannot be compiled: it is bad")
        self.begun.set()
        assert self.go_on.wait(10)
        return "compiled"


class CompilingEngine(FakeEngine):
    """An engine that records the grammars of its requests."""

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


class TriedEngine(CompilingEngine):
    """Finds one grammar too dear after a token."""

    def __init__(self, *args):
        super().__init__(*args)
        self.dear = None
        self.grammars.go_on.set()

    def step(self):
        outputs = super().step()
        for index, output in enumerate(outputs):
            if output.request_id == self.dear:
                self.abort_request(output.request_id)
                told = "response_format takes more computing or memory for each token than it may"
                outputs[index] = RequestOutput(output.request_id, (), FinishReason.ABORT, failure=told, is_refusal=True)
        return outputs

    def add_request(self, request, grammar=None):
        if request.params.grammar is not None and request.params.grammar.text == "dear":
            self.dear = request.request_id
        super().add_request(request, grammar)


def test_what_tries_grammars_out_starts_with_the_engine():
    async def scenario(source, pool):
        assert await asyncio.to_thread(source.engines["a"].grammars.warmed.wait, 10)
        assert tokens(await collect(pool, constrained("good"))) == expected_tokens((1, 2, 3), 7, 20)

    run(scenario, "a", engine=TriedEngine)


def test_a_grammar_that_turns_out_too_dear_is_the_clients_error_and_nobody_elses_matter():
    async def scenario(source, pool):
        other = asyncio.create_task(collect(pool, make_request("other")))
        with pytest.raises(RequestRefused) as caught:
            await collect(pool, constrained("dear"))
        error = as_api_error(caught.value)
        assert (error.status, error.param, error.code) == (400, "response_format", "invalid_value")
        assert tokens(await other) == expected_tokens((1, 2, 3), 7, 20)

    run(scenario, "a", engine=TriedEngine)


def test_an_engine_that_a_grammar_computes_in_for_ever_ends_and_others_go_on_elsewhere():
    async def scenario(source, pool):
        waiting = [asyncio.create_task(collect(pool, make_request(f"other {number}"))) for number in range(4)]
        await asyncio.sleep(0)
        source.loops["a"].loop.fail("a grammar has computed for more than 2 s")
        for task in waiting:
            assert tokens(await task) == expected_tokens((1, 2, 3), 7, 20)
        await asyncio.to_thread(wait_until, lambda: source.loops["a"].failure is not None)

    run(scenario, "a", "b")
