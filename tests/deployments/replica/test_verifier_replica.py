"""A verifier that cannot start leaves nothing behind: no drafter, no channel, no thread, no claim on a core."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from tests.fakes import FakeEngine
from wingbeat.cluster.channels.segment import PREFIX, SHM_DIR
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.metrics.client_figures import RouterFigures
from wingbeat.deployments.replica import verifier_replica as verifier
from wingbeat.deployments.replica.build import EngineSetup
from wingbeat.deployments.replica.verifier_replica import Verifier
from wingbeat.runtime.engine.round_clock import RoundClock
from wingbeat.runtime.protocol.messages import ChannelSpec

ENGINE_ID = "test-verifier"
SPEC = ChannelSpec(
    num_slots=1,
    num_nodes=2,
    max_path=2,
    max_prefill_tokens=4,
    taps_size=0,
    max_model_len=16,
    max_blocks_per_seq=4,
    block_size=4,
    num_blocks=8,
)


class FakeRayDrafter:
    """Notes that it was launched and killed."""

    made: ClassVar[list["FakeRayDrafter"]] = []
    attaches = True

    def __init__(self, config: AppConfig, core: int | None, convention: object = None) -> None:
        self.killed = False
        self.convention = convention
        self.made.append(self)

    def needs(self, convention: object = None) -> None:
        """Nothing."""

    async def pid(self) -> int:
        return 0

    async def attach(self, channel_name: str, incarnation: int) -> None:
        if not self.attaches:
            raise RuntimeError("cannot attach")

    def kill(self) -> None:
        self.killed = True


def fail_to_build(config: AppConfig, ask_needs: object) -> EngineSetup:
    """Engine factory of a checkpoint that cannot be read."""
    raise ValueError("cannot be built")


def build_unfit(config: AppConfig, ask_needs: object) -> EngineSetup:
    """Engine factory whose drafter fails its self-test."""
    return EngineSetup(FakeEngine(), ModelInfo("fake", 200, 50), SPEC, check_drafter=_unfit)


def _unfit(engine: FakeEngine) -> None:
    raise ValueError("unfit")


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done with cores; also puts the fakes in Ray's place."""
    done: list[str] = []
    claim = SimpleNamespace(core=0, release=lambda: done.append("released"))
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id=ENGINE_ID))
    monkeypatch.setattr(verifier, "claim_core", lambda: done.append("claimed") or claim)
    monkeypatch.setattr(verifier, "pin_thread", lambda core: None)
    monkeypatch.setattr(verifier, "show_log", lambda: None)
    monkeypatch.setattr(verifier.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(verifier.sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(verifier, "RayDrafter", FakeRayDrafter)
    monkeypatch.setattr(FakeRayDrafter, "made", [])
    return done


class Replica(Verifier):
    """A verifier whose end is awaited, as Serve awaits it; what Python itself calls when it is gone does nothing."""

    def __del__(self) -> None:
        pass

    async def end(self) -> None:
        """Serve's hook."""
        await super().__del__()


def channels() -> list[Path]:
    return list(SHM_DIR.glob(f"{PREFIX}{ENGINE_ID}*"))


@pytest.mark.parametrize(
    ("factory", "attaches", "message"),
    [
        ("fail_to_build", True, "cannot be built"),
        ("build_unfit", False, "cannot attach"),
        ("build_unfit", True, "unfit"),
    ],
    ids=["engine", "attach", "self-test"],
)
def test_a_failed_start_leaves_nothing_behind(
    claims: list[str], monkeypatch: pytest.MonkeyPatch, factory: str, attaches: bool, message: str
):
    monkeypatch.setattr(FakeRayDrafter, "attaches", attaches)
    monkeypatch.setattr(verifier, "build_setup", globals()[factory])
    num_threads = threading.active_count()

    async def start() -> Replica:
        made = Replica.__new__(Replica)
        with pytest.raises(Exception, match=message):
            await made.__init__(AppConfig())
        return made

    failed = asyncio.run(start())
    assert [drafter.killed for drafter in FakeRayDrafter.made] == [True]
    assert channels() == []
    assert claims == ["claimed", "released"]
    assert threading.active_count() <= num_threads
    asyncio.run(failed.end())  # what Serve may still do
    assert claims.count("released") >= 1


class TracedEngine(FakeEngine):
    """Has a clock, as Wingbeat's own."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = RoundClock()


def build_traced(config: AppConfig, ask_needs: object) -> EngineSetup:
    """Engine factory of an engine without a drafter."""
    return EngineSetup(TracedEngine(), ModelInfo("fake", 200, 50), None)


async def with_verifier(scenario: Callable[[Verifier], Awaitable[None]]) -> None:
    """Run a scenario on a verifier that has started."""
    made = Replica.__new__(Replica)
    await made.__init__(AppConfig(drafter="none"))
    try:
        await scenario(made)
    finally:
        await made.end()


def test_what_routers_report_comes_back_with_the_figures(claims: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifier, "build_setup", build_traced)

    async def scenario(made: Verifier) -> None:
        routers = [RouterFigures(name, lambda: 5) for name in ("r1", "r2")]
        for router in routers:
            router.of_engine(ENGINE_ID, 200).e2e_s.observe(1.0)
            router.answered(200)
        for router in (*routers, *routers):  # sums, so that hearing them twice changes nothing
            stats = await made.stats(engine_id=ENGINE_ID, report=router.report(ENGINE_ID))
        assert sum(stats["clients"]["e2e_s"]["counts"]) == 2
        assert {name: told["num_admitted"] for name, told in stats["routers"].items()} == {"r1": 5, "r2": 5}
        assert (stats["num_running"], stats["drafter_state"]) == (0, "none")

    asyncio.run(with_verifier(scenario))


def test_a_recording_ends_also_where_nobody_waits_for_it(claims: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifier, "build_setup", build_traced)

    async def scenario(made: Verifier) -> None:
        clock = made._loop._engine.clock
        assert await made.trace(engine_id=ENGINE_ID, seconds=0.01) == []
        left = asyncio.ensure_future(made.trace(engine_id=ENGINE_ID, seconds=60.0))
        while not clock._traces:
            await asyncio.sleep(0.001)
        left.cancel()
        await asyncio.wait([left])
        await made.stats()
        assert clock._traces == []

    asyncio.run(with_verifier(scenario))
