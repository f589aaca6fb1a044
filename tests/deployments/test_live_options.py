"""What a router's `user_config` changes while it runs."""

import asyncio

import pytest

from tests.deployments.http_world import TOKENIZER, FakePool
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.options.live_options import LiveOptions
from wingbeat.deployments.router import Router


class Front:
    """What stands for a `ModelFront`."""

    def __init__(self) -> None:
        self.taken: list[LiveOptions] = []

    def take(self, live: LiveOptions) -> None:
        self.taken.append(live)


@pytest.fixture
def router() -> Router:
    made = Router.__new__(Router)
    made._fronts, made._reporting = [Front(), Front()], []
    made._pool = FakePool()
    made._models, made._refuses_unknown_fields = ServedModels(CompletionService(made._pool, TOKENIZER)), False
    return made


def test_speculation_is_off_for_those_who_do_not_ask_and_on_again(router: Router):
    async def speculated(**fields) -> bool:
        await router.generate("x", **fields)
        return router._pool.requests[-1].params.speculation

    async def scenario() -> None:
        assert await speculated()
        await router.reconfigure({"speculation": False})
        assert not await speculated()
        assert await speculated(speculation={"enabled": True})
        await router.reconfigure({})
        assert await speculated()

    asyncio.run(scenario())


def test_limits_go_to_every_model_and_back(router: Router):
    asyncio.run(router.reconfigure({"max_queued_requests": 3, "engine_wait_s": 1.5}))
    asyncio.run(router.reconfigure({}))
    for front in router._fronts:
        assert [(live.max_queued_requests, live.engine_wait_s) for live in front.taken] == [(3, 1.5), (None, None)]


@pytest.mark.parametrize(
    ("user_config", "line"),
    [
        (
            {"max_queued_request": 1},
            "there is no setting user_config.max_queued_request: did you mean user_config.max_",
        ),
        ({"max_queued_requests": -1}, "user_config.max_queued_requests -1"),
        ({"log_level": "loud"}, "user_config.log_level loud"),
        (7, "user_config: "),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line_and_changes_nothing(router: Router, user_config, line: str):
    with pytest.raises(ValueError, match="user_config") as refused:
        asyncio.run(router.reconfigure(user_config))
    assert str(refused.value).startswith(line)
    assert not router._fronts[0].taken
