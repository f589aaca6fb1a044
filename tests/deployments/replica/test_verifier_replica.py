"""A replica and its engine's process: reports, leftovers, and consequences of the engine's death."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, TypeAlias

import pytest

from tests.deployments.pool_world import make_request
from tests.deployments.replica_world import Replica, started
from tests.fakes import expected_tokens
from tests.needs import needs
from wingbeat.cluster.channels.segment_files import PREFIX, SHM_DIR
from wingbeat.cluster.process_tree import descendants
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.wire import WireRequest, decode
from wingbeat.deployments.parts import first_result
from wingbeat.deployments.replica import engine_supervisor
from wingbeat.deployments.replica import verifier_replica as verifier
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.deployments.replica.verifier_replica import Verifier
from wingbeat.deployments.request_context import RequestContext

ENGINE_ID = "test-verifier"
ENGINES = "tests.deployments.replica.child_engines"
PATIENCE_S = 30.0
Runs: TypeAlias = Callable[[Callable[[Verifier], Awaitable[None]]], None]
"""Runs a scenario on a verifier."""


class FakeRayDrafter:
    """Notes that it was launched and killed."""

    made: ClassVar[list["FakeRayDrafter"]] = []
    attaches = True

    def __init__(self, config: AppConfig, core: int | None, terms: bytes | None = None) -> None:
        self.killed = False
        self.terms = terms
        self.made.append(self)

    async def needs(self, terms: bytes) -> bytes:
        raise AssertionError("no engine here asks")

    async def attach(self, channel_name: str, next_incarnation: Callable[[], int]) -> int:
        if not self.attaches:
            raise RuntimeError("cannot attach")
        return next_incarnation()

    def kill(self) -> None:
        self.killed = True


@pytest.fixture(autouse=True)
def claims(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Log of the cores claimed and released; also replaces Ray by fakes."""
    done: list[str] = []
    claim = SimpleNamespace(core=0, release=lambda: done.append("released"))
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id=ENGINE_ID))
    monkeypatch.setattr(verifier, "claim_core", lambda: done.append("claimed") or claim)
    monkeypatch.setattr(verifier, "show_log", lambda: None)
    monkeypatch.setattr(verifier.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(verifier, "RayDrafter", FakeRayDrafter)
    monkeypatch.setattr(FakeRayDrafter, "made", [])
    return done


def channels() -> list[Path]:
    return list(SHM_DIR.glob(f"{PREFIX}{ENGINE_ID}*"))


def children() -> list[int]:
    return [process.pid for process in descendants(os.getpid()) if process.alive()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "attaches", "message"),
    [
        ("build_none", True, "^cannot be built$"),
        pytest.param("build_unfit", False, "cannot attach", marks=pytest.mark.slow),
        pytest.param("build_unfit", True, "^unfit$", marks=pytest.mark.slow),
    ],
    ids=["engine", "attach", "self-test"],
)
def test_a_failed_start_leaves_nothing_behind(
    claims: list[str], monkeypatch: pytest.MonkeyPatch, factory: str, attaches: bool, message: str
):
    monkeypatch.setattr(FakeRayDrafter, "attaches", attaches)
    before = children()

    async def start() -> Replica:
        made = Replica.__new__(Replica)
        with pytest.raises((ValueError, RuntimeError), match=message):
            await made.__init__(AppConfig(threads=1, engine_factory=f"{ENGINES}:{factory}"))
        await made.end()  # what Serve may still do
        return made

    asyncio.run(start())
    assert [drafter.killed for drafter in FakeRayDrafter.made] == [True]
    assert channels() == []
    assert claims[:2] == ["claimed", "released"]
    assert set(children()) <= set(before), "those of earlier tests may have ended"


def test_a_drafter_that_has_not_come_is_shown_as_lost_and_not_as_one_that_nobody_wants(monkeypatch: pytest.MonkeyPatch):
    async def attach(*_given: object) -> int:
        await asyncio.Event().wait()
        raise AssertionError("nobody ends the wait")

    monkeypatch.setattr(FakeRayDrafter, "attach", attach)
    monkeypatch.setattr(FakeRayDrafter, "patience_s", 0.05, raising=False)

    async def scenario() -> None:
        made = await started(ENGINE_ID, AppConfig(threads=1, engine_factory=f"{ENGINES}:build_unfit"))
        try:
            stats = await made.stats()
        finally:
            await made.end()
        assert (stats["drafter_state"], stats["self_test"]) == ("lost", None)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


@contextmanager
def verifier_runs() -> Iterator[Runs]:
    """Runs scenarios on one verifier that has started."""
    with asyncio.Runner() as runner:
        config = AppConfig(drafter="none", engine_factory=f"{ENGINES}:build_plain")
        made = runner.run(started(ENGINE_ID, config))
        try:
            yield lambda scenario: runner.run(asyncio.wait_for(scenario(made), PATIENCE_S))
        finally:
            runner.run(made.end())


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    """A verifier that tests share."""
    with verifier_runs() as run:
        yield run


@pytest.fixture
def runs_alone() -> Iterator[Runs]:
    """A verifier that a test may ruin."""
    with verifier_runs() as run:
        yield run


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.005)


@needs("client_metrics")
def test_what_routers_report_comes_back_with_the_figures(runs: Runs):
    async def scenario(made: Verifier) -> None:
        routers = [first_result("router_figures", name, lambda: 5) for name in ("r1", "r2")]
        for router in routers:
            router.of_engine(ENGINE_ID, 200).e2e_s.observe(1.0)
            router.ended({}, RequestContext(status=200))
        for router in (*routers, *routers):  # sums, so that hearing them twice changes nothing
            stats = await made.stats(engine_id=ENGINE_ID, report=router.report(ENGINE_ID))
        assert sum(stats["clients"]["e2e_s"]["counts"]) == 2
        assert {name: told["num_admitted"] for name, told in stats["routers"].items()} == {"r1": 5, "r2": 5}
        assert (stats["num_running"], stats["drafter_state"]) == (0, "none")
        assert stats["pid"] == os.getpid() != stats["engine_pid"]

    runs(scenario)


async def _drained(messages: AsyncIterator[bytes]) -> None:
    async for _ in messages:
        pass


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_that_dies_ends_its_streams_at_once_and_another_takes_its_place(runs: Runs, number: signal.Signals):
    request = make_request(count=30)

    async def read(made: Verifier, wanted: int) -> list[int]:
        messages, got = made.stream(engine_id=ENGINE_ID, client_id="client"), []
        assert decode(await anext(messages)).outputs == []
        await made.exchange(engine_id=ENGINE_ID, client_id="client", requests=[WireRequest(0, request)])
        while len(got) < wanted:
            got += [token for output in decode(await anext(messages)).outputs for token in output.token_ids]
        if wanted < 30:
            os.kill((await made.stats())["engine_pid"], number)
            killed_at = time.monotonic()
            with pytest.raises(EngineFailed):
                await _drained(messages)
            assert time.monotonic() - killed_at < 1.0, "not left to a health check"
            with pytest.raises(EngineFailed, match="another one is being started"):
                await made.stats()
        await messages.aclose()
        return got

    async def scenario(made: Verifier) -> None:
        before = await made.stats()
        await read(made, 3)
        made.check_health()
        # The stream waits for the new engine.
        assert tuple(await read(made, 30)) == expected_tokens((1, 2, 3), 7, 30)
        stats = await made.stats()
        assert stats["num_engine_restarts"] == before["num_engine_restarts"] + 1
        assert stats["engine_pid"] != before["engine_pid"]

    runs(scenario)


@pytest.mark.slow
def test_a_router_of_other_settings_gets_no_stream_where_its_texts_would_be_others(runs: Runs):
    async def scenario(made: Verifier) -> None:
        own = (await made.describe()).text_identity
        assert own == AppConfig().text_identity()
        assert own != AppConfig(dtype="bfloat16").text_identity()
        messages = made.stream(engine_id=ENGINE_ID, client_id="client", text_identity=own)
        assert decode(await anext(messages)).outputs == []
        await messages.aclose()
        other = AppConfig(dtype="bfloat16").text_identity()
        with pytest.raises(verifier.OtherModel, match=r"in float32 on cpu is served here, not .* in bfloat16 on cpu$"):
            await anext(made.stream(engine_id=ENGINE_ID, client_id="client", text_identity=other))

    runs(scenario)


@pytest.mark.slow
def test_a_replica_whose_engines_die_too_often_says_that_it_is_unhealthy(runs_alone: Runs, monkeypatch):
    monkeypatch.setattr(engine_supervisor, "PAUSES_S", ())

    async def scenario(made: Verifier) -> None:
        made.check_health()
        os.kill((await made.stats())["engine_pid"], signal.SIGKILL)

        async def failed() -> bool:
            return made._engines.failure is not None

        await until(failed)
        with pytest.raises(EngineFailed, match=r"1 engines in a row have died: .*signal 9"):
            made.check_health()
        with pytest.raises(EngineFailed):
            await anext(made.stream(engine_id=ENGINE_ID, client_id="client"))

    runs_alone(scenario)
