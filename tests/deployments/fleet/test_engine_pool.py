"""The pool and the engine's thread, joined without Ray: requests spread, stream, abort and survive their engine."""

import asyncio
import contextlib
import pickle
import time

import numpy as np
import pytest

from tests.deployments.engine_world import ThreadedEngine
from tests.deployments.pool_world import LocalEngines, collect, make_request, run, tokens
from tests.fakes import FakeEngine, expected_tokens, wait_until
from wingbeat.cluster.routing import EngineLoad, TokenRate
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import EngineOverloaded, EngineUnavailable, ModelInfo
from wingbeat.deployments.fleet.wire import EngineReport, Verdict, WireOutput, WireRequest, decode, encode, received
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.deployments.replica.router_stream import Outbox, RouterStream
from wingbeat.runtime.kv.block_hashes import CacheChanges
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.packed_logprobs import PackedLogprobs
from wingbeat.runtime.scheduling.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    VerifiedRound,
)


def test_a_request_streams_its_tokens_in_order_and_ends_with_metrics():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        outputs = await collect(pool, make_request())
        assert tokens(outputs) == expected_tokens((1, 2, 3), 7, 20)
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        last = outputs[-1]
        assert (last.request_id, last.finish_reason, last.num_cached_tokens) == ("r", FinishReason.LENGTH, 3)
        assert last.metrics == SpeculationMetrics(20, 80, 0)

    run(scenario, "a")


def test_concurrent_requests_use_every_engine_and_do_not_mix():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        requests = [make_request(str(i), (i, i + 1), 10 + i, seed=i) for i in range(12)]
        results = await asyncio.gather(*(collect(pool, request) for request in requests))
        for request, outputs in zip(requests, results, strict=True):
            params = request.params
            assert tokens(outputs) == expected_tokens(request.prompt_token_ids, params.seed, params.max_tokens)
        assert {engine.num_started for engine in source.engines.values()} == {4}

    run(scenario, "a", "b", "c")


def test_closing_a_generator_early_aborts_its_request_in_the_engine():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        async with contextlib.aclosing(pool.generate(make_request(count=190))) as outputs:
            async for _ in outputs:
                break
        await asyncio.to_thread(wait_until, lambda: not source.engines["a"].has_unfinished_requests())
        assert pool.loads() == [EngineLoad("a", 0, 0)]

    run(scenario, "a")


def test_a_cancelled_consumer_aborts_its_request_in_the_engine():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        task = asyncio.create_task(collect(pool, make_request(count=190)))
        await asyncio.to_thread(wait_until, source.engines["a"].has_unfinished_requests)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.to_thread(wait_until, lambda: not source.engines["a"].has_unfinished_requests())

    run(scenario, "a")


def test_a_request_the_engine_refuses_raises_its_reason_and_leaves_the_others_alone():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        good = asyncio.create_task(collect(pool, make_request("good")))
        with pytest.raises(ValueError, match="does not fit 200"):
            await collect(pool, make_request("long", count=500))
        assert tokens(await good) == expected_tokens((1, 2, 3), 7, 20)

    run(scenario, "a")


def test_beyond_running_capacity_and_queue_nothing_is_admitted_until_places_are_given_back():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        one, others = pool.admit(1), pool.admit(4)
        with pytest.raises(EngineOverloaded):
            pool.admit(1)
        one.release()
        one.release()
        pool.admit(1)
        with pytest.raises(EngineOverloaded):
            pool.admit(1)
        others.release(3)
        with pytest.raises(EngineOverloaded):
            pool.admit(4)
        others.release(9)
        assert (pool.admit(4).release(), pool.num_admitted) == (None, 1)

    run(scenario, "a", max_num_seqs=2, max_queued_requests=3)


def test_places_may_become_fewer_and_more_while_it_runs():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        pool.limit(0, 0.0)
        held = pool.admit(2)
        with pytest.raises(EngineOverloaded):
            pool.admit(1)
        pool.limit(1, 0.0)
        pool.admit(1)
        assert pool.max_requests == 3
        held.release()

    run(scenario, "a", max_num_seqs=2, max_queued_requests=3)


def test_places_are_those_that_the_engines_say_they_have(monkeypatch):
    async def describe(source: LocalEngines) -> ModelInfo:
        return ModelInfo("fake", 200, 50, max_num_seqs=5)

    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        assert pool.max_requests == 5 + 3
        with pytest.raises(EngineOverloaded):
            pool.admit(9)

    monkeypatch.setattr(LocalEngines, "describe", describe)
    run(scenario, "a", max_num_seqs=256, max_queued_requests=3)


def test_a_refusal_says_when_the_engines_will_have_written_enough_at_the_rate_they_write(monkeypatch):
    monkeypatch.setattr(TokenRate, "per_s", lambda self, now: 10.0)

    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.engines["a"].round_s = 0.05
        pool.admit(1)
        task = asyncio.create_task(collect(pool, make_request(count=190)))
        await asyncio.to_thread(wait_until, source.engines["a"].has_unfinished_requests)
        with pytest.raises(EngineOverloaded) as refused:
            pool.admit(1)
        assert 10 < refused.value.retry_after_s <= 19
        task.cancel()
        await asyncio.wait([task])

    run(scenario, "a", max_num_seqs=1, max_queued_requests=0)


def test_tokens_that_arrive_are_measured():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        pool.admit(1)
        await collect(pool, make_request(count=60))
        # Rounds of 2 ms at least.
        assert 0 < pool._token_rate.per_s(time.monotonic()) < 500

    run(scenario, "a")


def test_requests_of_an_engine_that_fails_continue_elsewhere_with_the_same_text():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        tasks = [asyncio.create_task(collect(pool, make_request(str(i), (i,), 100, seed=i))) for i in range(6)]
        await asyncio.to_thread(wait_until, lambda: source.loops["a"].num_requests == 3)
        source.engines["a"].broken = True
        source.announce("b")
        for i, outputs in enumerate(await asyncio.gather(*tasks)):
            assert tokens(outputs) == expected_tokens((i,), i, 100)

    run(scenario, "a", "b")


def test_without_an_engine_requests_fail_as_unavailable_and_the_pool_is_unhealthy():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        assert pool.healthy()
        source.engines["a"].broken = True
        with pytest.raises(EngineUnavailable):
            await collect(pool, make_request())
        assert not pool.healthy()
        with pytest.raises(EngineFailed):
            source.loops["a"].client.check_alive()

    run(scenario, "a")


def test_a_draining_pool_refuses_what_comes_lets_what_runs_end_and_then_returns():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        task = asyncio.create_task(collect(pool, make_request(count=100)))
        await asyncio.to_thread(wait_until, lambda: source.loops["a"].num_requests == 1)
        drained = asyncio.create_task(pool.drain(20.0))
        await asyncio.sleep(0)
        assert not pool.healthy()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            pool.admit(1)
        assert not drained.done()
        assert tokens(await task) == expected_tokens((1, 2, 3), 7, 100)
        await drained

    run(scenario, "a")


def test_what_still_runs_when_the_time_to_drain_is_over_ends_by_an_error_after_its_tokens():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        came = []

        async def read() -> None:
            async for output in pool.generate(make_request(count=190)):
                came.extend(output.token_ids)

        source.engines["a"].round_s = 0.05
        task = asyncio.create_task(read())
        await asyncio.to_thread(wait_until, lambda: len(came) > 0)
        await pool.drain(0.0)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await task
        assert tuple(came) == expected_tokens((1, 2, 3), 7, len(came))

    run(scenario, "a")


def test_an_engine_taken_out_finishes_what_it_runs_and_gets_nothing_new():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        tasks = [asyncio.create_task(collect(pool, make_request(str(i), count=100))) for i in range(2)]
        await asyncio.to_thread(wait_until, lambda: source.loops["a"].num_requests == 1)
        source.announce("b")
        await asyncio.gather(*(collect(pool, make_request(f"new {i}", count=5)) for i in range(4)))
        assert source.engines["a"].num_started == 1
        for outputs in await asyncio.gather(*tasks):
            assert tokens(outputs) == expected_tokens((1, 2, 3), 7, 100)

    run(scenario, "a", "b")


@pytest.mark.slow
def test_an_idle_engine_checks_its_integrity_once():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        await collect(pool, make_request(count=3))
        await asyncio.to_thread(wait_until, lambda: source.engines["a"].num_checks == 1)

    run(scenario, "a")


def test_within_the_interval_several_rounds_become_one_message():
    outbox = Outbox(interval_s=10.0)
    for i in range(5):
        outbox.put(1, RequestOutput("r", (i,)), urgent=i == 0)
        assert outbox.due(float(i)) == (i == 0)
        if i == 0:
            assert [part.token_ids for part in decode(outbox.take(0.0)).outputs] == [[0]]
    outbox.put(1, RequestOutput("r", (5,), FinishReason.STOP), urgent=True)
    assert outbox.due(5.0)
    (output,) = decode(outbox.take(5.0)).outputs
    assert output.token_ids == [1, 2, 3, 4, 5]
    assert output.finish_reason is FinishReason.STOP


def test_a_slow_consumer_gets_several_messages_as_one():
    async def scenario() -> None:
        stream = RouterStream()
        for i in range(5):
            stream.put([WireOutput.of(1, RequestOutput("r", (i,))), WireOutput.of(2, RequestOutput("s", (9,)))])
        stream.put([WireOutput.of(1, RequestOutput("r", (5,), FinishReason.STOP))])
        one, other = decode(await stream.take()).outputs
        assert one.opened() == RequestOutput("", (0, 1, 2, 3, 4, 5), FinishReason.STOP)
        assert other.token_ids == [9] * 5

    asyncio.run(asyncio.wait_for(scenario(), 5))


@pytest.mark.parametrize("wrong", [{"token_ids": None}, {"token_ids": (object(),)}, {"finish_reason": object()}])
def test_an_output_that_cannot_be_sent_gives_up_its_request_alone(wrong):
    outbox = Outbox(interval_s=0.0)
    outbox.put(2, RequestOutput("s", (9,)), urgent=False)
    outbox.put(1, RequestOutput("r", (1,))._replace(**wrong), urgent=False)
    good, bad = decode(outbox.take(0.0)).outputs
    assert good.opened() == RequestOutput("", (9,))
    assert (bad.number, bad.given_up.verdict) == (1, Verdict.FAILED)


def test_nothing_of_a_request_that_is_given_up_comes_behind_that():
    async def scenario() -> None:
        stream = RouterStream()
        stream.put([WireOutput.of(1, RequestOutput("r", (4,)))])
        stream.give_up(1, Verdict.FAILED, "of the test")
        stream.put([WireOutput.of(1, RequestOutput("r", (5,)))])
        before, last = decode(await stream.take()).outputs
        assert (before.token_ids, last.given_up) == ([4], (Verdict.FAILED, "of the test"))

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_requests_and_outputs_survive_the_wire():
    params = SamplingParams(5, 0.5, 0.9, 3, 0.1, -9, True, False, trace=True)
    sent = pickle.loads(pickle.dumps(WireRequest(3, Request("x", (4, 5), params))))
    assert received(sent.request, "y") == Request("y", (4, 5), params)
    metrics = SpeculationMetrics(3, 9, 2, [2, 0])
    rounds = VerifiedRound((1,), plain_reason="plain"), VerifiedRound((2,), (1, 2, 3), (-1, 0, 0), (1,))
    logprobs = TokenLogprob(-0.5, ((1, -0.5), (2, -3.0))), TokenLogprob(float("-inf"))
    output = RequestOutput("", (1, 2), FinishReason.LENGTH, metrics, 16, logprobs=logprobs, rounds=rounds, queue_s=0.5)
    of_prompt = PackedLogprobs(np.arange(6).reshape(2, 3))
    reported, refused = output._replace(prompt_logprobs=of_prompt), output._replace(failure="x", is_refusal=True)
    message = encode([WireOutput.of(8, one) for one in (output, reported, refused)])
    got, other, given_up = decode(message).outputs
    assert (got.number, got.opened(), got.is_last) == (8, output, True)
    assert list(other.opened().prompt_logprobs) == list(of_prompt)
    assert given_up.given_up == (Verdict.REFUSED, "x")
    report = EngineReport(CacheChanges(True, b"a", b"b"), (3, 400), stalled=True)
    assert decode(encode([], report)) == ([], report)


def test_an_engine_whose_replica_does_not_read_goes_on_and_loses_no_token():
    async def scenario() -> None:
        fake = FakeEngine()
        engine = ThreadedEngine(fake, ring_bytes=2048)
        stream = engine.connect("client")
        requests = [make_request(count=190, seed=seed) for seed in range(4)]
        engine.submit("client", [WireRequest(number, request) for number, request in enumerate(requests)])
        # This thread is the replica's event loop.
        wait_until(lambda: fake.num_started == 4 and not fake.has_unfinished_requests())
        assert engine.client._link._in.has_bytes
        got: dict[int, list[int]] = {number: [] for number in range(4)}
        while min(map(len, got.values())) < 190:
            for output in decode(await stream.take()).outputs:
                got[output.number] += output.token_ids
        assert [tuple(got[seed]) for seed in range(4)] == [expected_tokens((1, 2, 3), seed, 190) for seed in range(4)]
        engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
