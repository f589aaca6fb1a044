"""Admission of a request's choices: all of them or none, for as long as they run."""

import asyncio

import pytest

from tests.deployments.http_world import TOKENIZER, FakePool, complete
from wingbeat.deployments.api.answers.generation import Generation
from wingbeat.deployments.api.bodies.requests import CompletionBody
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.fleet.interface import EngineOverloaded, EngineUnavailable


async def plan(service: CompletionService, n: int) -> Generation:
    return await service.plan_completion(CompletionBody(model="demo", prompt="hi", max_tokens=40, n=n))


def test_choices_start_together_or_not_at_all():
    pool = FakePool()
    pool.max_requests, pool.num_admitted = 4, 2
    assert complete(pool, n=3).status_code == 503
    assert not pool.requests
    assert complete(pool, n=2).status_code == 200
    assert (len(pool.requests), pool.num_admitted) == (2, 2)


def test_two_requests_of_one_moment_cannot_take_the_same_places():
    async def scenario() -> list[bool]:
        pool = FakePool()
        pool.max_requests, pool.hang_after = 4, 1
        service = CompletionService(pool, TOKENIZER)
        runs = [service.run(await plan(service, n=3)) for _ in range(2)]
        first = await asyncio.gather(*(anext(run) for run in runs), return_exceptions=True)
        assert len(pool.requests) == 3
        for run in runs:
            await run.aclose()
        assert pool.num_admitted == 0
        return [isinstance(result, EngineOverloaded) for result in first]

    assert sorted(asyncio.run(scenario())) == [False, True]


def test_more_choices_than_there_will_ever_be_places_for_are_a_bad_request():
    pool = FakePool()
    pool.max_requests = 4
    error = complete(pool, n=5).json()["error"]
    assert (error["param"], error["code"]) == ("n", "invalid_value")
    assert not pool.requests


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mishap", [None, EngineUnavailable("gone"), RuntimeError("bug")])
def test_places_are_given_back_however_a_request_ends(n, mishap):
    pool = FakePool()
    pool.fail_after = None if mishap is None else (1, mishap)
    assert (complete(pool, n=n).status_code == 200) == (mishap is None)
    assert pool.num_admitted == 0


def test_a_choice_that_ends_gives_its_place_back_before_the_others_end():
    async def scenario() -> None:
        pool = FakePool(lambda request: "x" * (2 if request.params.seed % 2 else 30), tokens_per_output=1)
        service = CompletionService(pool, TOKENIZER)
        body = CompletionBody(model="demo", prompt="hi", max_tokens=40, n=2, seed=0)
        numbers = [pool.num_admitted async for _ in service.run(await service.plan_completion(body))]
        assert (numbers[0], numbers[-1], pool.num_admitted) == (2, 0, 0)
        assert numbers.count(1) > 20

    asyncio.run(scenario())
