"""Changes of a running router's and verifier's `user_config`."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from tests.deployments.http_world import TOKENIZER, FakePool
from tests.needs import needs
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.live_settings import live_verifier
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.deployments.replica.verifier_replica import Verifier
from wingbeat.deployments.router import Router


class Front:
    """A stand-in for a `ModelFront`."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, float]] = []
        self.config = AppConfig()
        self.pool = self

    def limit(self, max_queued_requests: int, engine_wait_s: float) -> None:
        self.taken.append((max_queued_requests, engine_wait_s))


class Unserved(Router):
    """A router that Serve has not started and does not end."""

    def __del__(self) -> None:
        """Nothing: the router's is a coroutine, which Serve awaits."""


@pytest.fixture
def router() -> Router:
    made = Unserved.__new__(Unserved)
    made._fronts, made._reporting, made._is_up = [Front(), Front()], [], False
    made._pool = FakePool()
    made._models, made._refuses_unknown_fields = ServedModels(CompletionService(made._pool, TOKENIZER)), False
    return made


@needs("handles")
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
        assert front.taken == [(3, 1.5), (256, 120.0)]


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
        ({"lora_modules": {"sql": 1}}, "user_config.lora_modules"),
        ({"lora_modules": {" sql": "sql"}}, "user_config.lora_modules"),
        ({"lora_modules": {"sql": "sql"}}, "user_config.lora_modules: there are several models"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line_and_changes_nothing(router: Router, user_config, line: str):
    with pytest.raises(ValueError, match="user_config") as refused:
        asyncio.run(router.reconfigure(user_config))
    assert str(refused.value).startswith(line)
    assert not router._fronts[0].taken


def test_a_router_that_runs_goes_on_as_it_was_and_says_why(router: Router, caplog):
    asyncio.run(router.reconfigure({"max_queued_requests": 3}))
    router.check_health()
    with caplog.at_level(logging.ERROR, "wingbeat"):
        asyncio.run(router.reconfigure({"max_queued_requests": 7, "log_level": "loud"}))
    assert router._fronts[0].taken == [(3, 120.0)]
    (said,) = caplog.messages
    assert said.startswith("user_config.log_level loud")
    assert said.endswith("This replica keeps its settings.")


class Engines:
    """A stand-in for an `EngineSupervisor`."""

    failure = None
    problem: Exception | None = None
    answers = True

    def __init__(self) -> None:
        self.told: list[tuple] = []

    async def ready(self) -> "Engines":
        if not self.answers:
            await asyncio.Event().wait()
        if self.problem is not None:
            raise self.problem
        return self

    async def call(self, *words) -> None:
        self.told.append(words)


class UnservedVerifier(Verifier):
    """A verifier that Serve has not started and does not end."""

    def __del__(self) -> None:
        """Nothing: the verifier's is a coroutine, which Serve awaits."""


@pytest.fixture
def replica() -> Iterator[Verifier]:
    made = UnservedVerifier.__new__(UnservedVerifier)
    made._engines = Engines()
    level = logging.getLogger("wingbeat").level
    yield made
    logging.getLogger("wingbeat").setLevel(level)


def test_a_verifier_and_its_engines_write_from_another_level_up(replica: Verifier, caplog):
    with pytest.raises(ValueError, match=r"^user_config\.log_level loud"):
        asyncio.run(replica.reconfigure({"log_level": "loud"}))
    asyncio.run(replica.reconfigure({"log_level": "warning"}))
    replica.check_health()
    asyncio.run(replica.reconfigure({"speculation": False}))
    assert "there is no setting user_config.speculation" in caplog.messages[0]
    assert replica._engines.told == [("set_log_level", "warning")]
    assert replica.log_level == "warning"
    assert logging.getLogger("wingbeat").level == logging.WARNING


@pytest.mark.parametrize("problem", [None, EngineFailed("it died"), TimeoutError("no answer")])
def test_an_engine_that_cannot_be_told_stops_no_replica(replica: Verifier, problem, monkeypatch, caplog):
    monkeypatch.setattr(live_verifier, "TOLD_S", 0.01)
    replica._engines.problem, replica._engines.answers = problem, problem is not None
    asyncio.run(replica.reconfigure({"log_level": "warning"}))
    assert "keeps its log level" in caplog.messages[-1]
    assert replica.log_level == "warning"
