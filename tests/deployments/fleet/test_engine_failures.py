"""A request cannot harm other requests; requests of an engine that dies are resumed or fail."""

import asyncio
import threading
from copy import copy
from dataclasses import replace
from functools import partial

import pytest

from tests.deployments.pool_world import LocalEngines, collect, make_request, run, tokens
from tests.fakes import DEADLY, POISON, DeadlyEngine, FakeEngine, expected_tokens, vanish, wait_until
from wingbeat.deployments.fleet import connection as engine_connection
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import RequestFailed
from wingbeat.deployments.fleet.wire import PendingOutputs, Verdict, WireOutput, WireRequest, decode
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.runtime.scheduling.request import ALONE_TOKENS, Request, RequestOutput

EXPECTED = expected_tokens((1, 2, 3), 7, 100)


class FragileEngine(FakeEngine):
    """An engine that fails on prompts beginning with 13, with an unexpected error."""

    def add_request(self, request: Request, grammar: None = None) -> None:
        if request.prompt_token_ids[0] == 13:
            raise OverflowError("unlucky")
        super().add_request(request, grammar)


class UnsendableEngine(FakeEngine):
    """The second output of a prompt that begins with 13 is none."""

    def step(self) -> list[RequestOutput]:
        unlucky = {key for key, (request, done) in self._running.items() if request.prompt_token_ids[0] == 13 and done}
        outputs = super().step()
        return [output._replace(token_ids=None) if output.request_id in unlucky else output for output in outputs]


def bystander(pool: EnginePool, count: int = 100) -> asyncio.Task:
    return asyncio.create_task(collect(pool, make_request("bystander", count=count)))


async def serving(source: LocalEngines, prompt: tuple[int, ...]) -> str:
    """The live engine that holds a request with this beginning of the prompt."""
    while True:
        for name in source.engines:
            if source.serves(name, prompt):
                return name
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("engine", [FragileEngine, UnsendableEngine])
def test_a_request_whose_processing_raises_fails_and_its_neighbour_notices_nothing(engine):
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        good = bystander(pool)
        with pytest.raises(RequestFailed):
            await collect(pool, make_request("bad", (13,), 100))
        assert tokens(await good) == EXPECTED
        await asyncio.to_thread(wait_until, lambda: not source.engines["a"].has_unfinished_requests())

    run(scenario, "a", engine=engine)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_tokens", 0), ("max_tokens", 2**40), ("temperature", "hot"), ("temperature", float("nan"))],
        *[("top_p", None), ("top_k", 2**63), ("top_k", 1.5), ("min_p", []), ("seed", 2**63)],
        *[("presence_penalty", None), ("frequency_penalty", 3.0), ("repetition_penalty", 0.0)],
        *[("logit_bias", ((1, float("nan")),)), ("logit_bias", 7), ("allowed_token_ids", ("a",))],
        *[("bad_words", ((),)), ("bad_words", (1,)), ("banned_first", 7), ("banned_first", ("a",))],
        *[("min_tokens", -1), ("stop_token_ids", (1.5,)), ("logprobs", 21), ("prompt_logprobs", "1")],
        *[("priority", 2**31), ("cache_salt", 5), ("grammar", ("json",))],
    ],
    ids=str,
)
def test_parameters_that_fit_no_tensor_end_their_request_alone(name, value, monkeypatch):
    def corrupt(number, request):
        if request.request_id == "bad":
            request = replace(request, params=copy(request.params))
            object.__setattr__(request.params, name, value)
        return WireRequest(number, request)

    monkeypatch.setattr(engine_connection, "WireRequest", corrupt)

    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        good = bystander(pool)
        with pytest.raises((ValueError, RequestFailed)):
            await collect(pool, make_request("bad"))
        assert tokens(await good) == EXPECTED

    run(scenario, "a")


def test_an_output_that_cannot_be_read_ends_its_request_alone(monkeypatch):
    put = PendingOutputs.put

    def corrupt(self: PendingOutputs, output: WireOutput) -> None:
        if output.number:
            output.finish_reason = "?"
        put(self, output)

    monkeypatch.setattr(PendingOutputs, "put", corrupt)

    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        good = bystander(pool)
        await asyncio.sleep(0)
        with pytest.raises(RequestFailed, match="cannot be read"):
            await collect(pool, make_request("bad"))
        assert tokens(await good) == EXPECTED
        await asyncio.to_thread(wait_until, lambda: not source.engines["a"].has_unfinished_requests())

    run(scenario, "a")


def test_a_number_submitted_twice_runs_once_and_an_unknown_one_is_aborted_in_vain():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        loop = source.loops["a"]
        box = loop.connect("client")
        for _ in range(3):
            loop.submit("client", [WireRequest(0, make_request(count=30))] * 2)
        loop.client.abort("client", [5, -1])
        loop.client.abort("nobody", [0])
        got: list[int] = []
        while len(got) < 30:
            got += [token for output in decode(await box.take()).outputs for token in output.token_ids]
        assert (tuple(got), source.engines["a"].num_started) == (EXPECTED[:30], 1)

    run(scenario, "a")


def test_what_has_no_number_is_refused_before_it_reaches_the_engine():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.loops["a"].connect("client")
        good = bystander(pool)
        for nonsense in ((), None, 7):
            with pytest.raises(AttributeError):
                source.loops["a"].submit("client", [nonsense])
        assert tokens(await good) == EXPECTED

    run(scenario, "a")


def test_a_request_that_breaks_its_engine_in_its_first_round_is_not_tried_on_the_next():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        others = [bystander(pool), bystander(pool)]
        await asyncio.to_thread(wait_until, lambda: all(loop.num_requests for loop in source.loops.values()))
        await asyncio.sleep(0.05)
        with pytest.raises(RequestFailed):
            await collect(pool, make_request("bad", (POISON,)))
        assert [tokens(await task) for task in others] == [EXPECTED] * 2
        assert sum(loop.failure is not None for loop in source.loops.values()) == 1
        assert tokens(await collect(pool, make_request())) == EXPECTED[:20]

    run(scenario, "a", "b")


def test_a_request_that_only_waited_on_broken_engines_is_moved_as_often_as_it_takes():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        holders = [bystander(pool, 190) for _ in "abcd"]
        await asyncio.to_thread(wait_until, lambda: all(loop.num_requests for loop in source.loops.values()))
        waiting = asyncio.create_task(collect(pool, make_request("waits", (9,), 10)))
        for _ in "abc":
            name = await serving(source, (9,))
            source.engines[name].broken = True
            while source.loops[name].failure is None:
                await asyncio.sleep(0.001)
        for holder in holders:
            holder.cancel()
        assert tokens(await waiting) == expected_tokens((9,), 7, 10)

    run(scenario, "a", "b", "c", "d", engine=partial(FakeEngine, max_num_seqs=1))


@pytest.mark.parametrize("in_first_round", [False, True])
def test_an_engine_that_vanishes_loses_no_request_wherever_it_is(in_first_round):
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        for engine in source.engines.values():
            engine.round_s = 0.2 if in_first_round else 0.002
        tasks = [bystander(pool) for _ in range(6)]
        await asyncio.to_thread(wait_until, lambda: all(loop.num_requests == 3 for loop in source.loops.values()))
        source.kill("a")
        for engine in source.engines.values():
            engine.round_s = 0.002
        assert [tokens(outputs) for outputs in await asyncio.gather(*tasks)] == [EXPECTED] * 6

    run(scenario, "a", "b")


async def all_on(source: LocalEngines, name: str, tasks: list[asyncio.Task]) -> None:
    """Wait until an engine has taken as many requests as there are tasks."""
    while len(source.engines[name].taken) < len(tasks):
        await asyncio.sleep(0.001)


async def end_of(source: LocalEngines, name: str) -> None:
    """Until an engine has vanished."""
    while source.loops[name].thread.is_alive():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("first", [False, True], ids=["behind its neighbours", "before them"])
@pytest.mark.parametrize("whole_replica", [False, True])
def test_only_what_kills_three_engines_in_a_row_fails_and_its_neighbours_on_all_of_them_do_not(whole_replica, first):
    """Every request is on every engine that dies."""

    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        event_loop = asyncio.get_running_loop()

        def take_the_replica_along(name: str) -> None:
            event_loop.call_soon_threadsafe(source.kill, name)
            vanish()

        if whole_replica:
            for name, engine in source.engines.items():
                engine.die = partial(take_the_replica_along, name)
        source.announce()
        while pool.loads():
            await asyncio.sleep(0.001)
        tasks = [bystander(pool) for _ in range(4 * (not first))]
        bad = asyncio.create_task(collect(pool, make_request("bad", (DEADLY,), 100)))
        await asyncio.sleep(0)
        tasks += [bystander(pool) for _ in range(4 * first)]
        while pool._wait.num_waiting < 5:
            await asyncio.sleep(0.001)
        source.announce("a")
        await all_on(source, "a", [*tasks, bad])
        for name, following in ("ab", "bc"):
            await end_of(source, name)
            source.announce(following)
            await all_on(source, following, [*tasks, bad])
        await end_of(source, "c")
        source.announce("d")
        with pytest.raises(RequestFailed, match="3 engines in a row"):
            await bad
        assert [tokens(await task) for task in tasks] == [EXPECTED] * 4
        assert source.loops["d"].thread.is_alive()

    run(scenario, "a", "b", "c", "d", engine=DeadlyEngine, engine_wait_s=10.0)


def test_what_waits_for_another_routers_request_that_runs_alone_is_handed_back_without_blame():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        loop, gate = source.loops["a"], threading.Event()
        source.engines["a"].check_integrity = gate.wait
        one, other = loop.connect("one"), loop.connect("other")
        loop.client.call("check_integrity")
        for client_id, prompt in (("one", (DEADLY,)), ("other", (1, 2, 3))):
            loop.submit(client_id, [WireRequest(0, replace(make_request(prompt=prompt), alone=True))])
        gate.set()
        (waited,) = decode(await other.take()).outputs
        assert waited.given_up == (Verdict.RETURNED, "it vanished")
        with pytest.raises(EngineFailed, match="it vanished"):
            await one.take()

    run(scenario, "a", engine=DeadlyEngine)


def test_a_request_that_goes_on_well_after_each_death_is_moved_as_often_as_it_takes():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        got: list[int] = []

        async def follow() -> None:
            async for output in pool.generate(make_request(count=190)):
                got.extend(output.token_ids)

        task = asyncio.create_task(follow())
        for _ in "abcd":
            enough = len(got) + 2 * ALONE_TOKENS
            while len(got) < enough:
                await asyncio.sleep(0.001)
            source.kill(await serving(source, (1, 2, 3)))
        await task
        assert tuple(got) == expected_tokens((1, 2, 3), 7, 190)

    run(scenario, "a", "b", "c", "d", "e")


@pytest.mark.slow
def test_a_router_that_is_taken_for_dead_again_and_again_loses_no_request():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.engines["a"].round_s = 0.05
        task = bystander(pool)
        for num_taken in range(1, 6):
            while len(source.engines["a"].taken) < num_taken:
                await asyncio.sleep(0.001)
            (connection,) = pool.connections.values()
            source.loops["a"].client.disconnect(connection.client_id)
        source.engines["a"].round_s = 0.002
        assert tokens(await task) == EXPECTED

    run(scenario, "a", engine_wait_s=10.0)


@pytest.mark.parametrize("vanishes", [False, True])
def test_of_several_that_may_have_broken_an_engine_only_the_one_that_breaks_another_alone_fails(vanishes):
    def die_of(requests: list[Request]) -> None:
        if any(POISON in request.prompt_token_ids for request in requests):
            vanish()

    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        for name in "bc" if vanishes else "":
            source.engines[name].compute = die_of
        source.announce("a")
        for engine in source.engines.values():
            engine.round_s = 0.1
        tasks = [bystander(pool, 20) for _ in range(3)]
        bad = asyncio.create_task(collect(pool, make_request("bad", (POISON,), 20)))
        while source.loops["a"].failure is None:
            await asyncio.sleep(0.001)
        for engine in source.engines.values():
            engine.round_s = 0.002
        source.announce("b", "c")
        with pytest.raises(RequestFailed):
            await bad
        assert [tokens(await task) for task in tasks] == [EXPECTED[:20]] * 3
        assert sum(loop.failure is not None for loop in source.loops.values()) == 2

    run(scenario, "a", "b", "c", engine_wait_s=10.0)


def test_an_engine_that_is_stopped_hands_back_what_it_has_without_blame():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        task = bystander(pool)
        for _ in range(3):
            await asyncio.to_thread(source.loops[await serving(source, (1, 2, 3))].stop)
        assert tokens(await task) == EXPECTED

    run(scenario, "a", "b", "c", "d")


def test_a_loop_that_is_stopped_while_it_is_busy_ends_as_soon_as_it_is_not():
    begun, gate = threading.Event(), threading.Event()

    class BusyEngine(FakeEngine):
        def check_integrity(self) -> None:
            begun.set()
            gate.wait(10)

    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        loop = source.loops["a"]
        answer = loop.client.call("check_integrity")
        await asyncio.to_thread(begun.wait, 10)
        loop.client.stop()
        assert loop.thread.is_alive()
        gate.set()
        await answer
        await asyncio.wait_for(loop.client.lost(), 5)

    run(scenario, "a", engine=BusyEngine)


def test_what_an_engine_had_not_read_when_it_vanished_is_moved_as_often_as_it_takes():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        gate = threading.Event()
        for engine in source.engines.values():
            engine.check_integrity = gate.wait
        for loop in source.loops.values():
            loop.client.call("check_integrity")
        task = bystander(pool)
        for name in "abc":
            while not source.loops[name].num_requests:
                await asyncio.sleep(0.001)
            source.loops[name].client.lose("killed by the test")
        gate.set()
        assert tokens(await task) == EXPECTED

    run(scenario, "a", "b", "c", "d")
