"""A router's view of Serve's replicas while an application is updated; no Ray."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.serve._private.common import RequestMetadata
from ray.serve._private.default_impl import get_request_metadata
from ray.serve._private.handle_options import DynamicHandleOptions, InitHandleOptions
from ray.serve.context import _set_request_context

from wingbeat.deployments.fleet import serve_engines
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.fleet.serve_engines import ServeEngines

CALLS = ["exchange", "stats", "operate", "tell"]


class NotingHandle:
    """Records the request metadata that Serve would attach to each call."""

    def __init__(self, noted: list[RequestMetadata], method_name: str = "") -> None:
        self.noted = noted
        self.method_name = method_name

    def options(self, *, method_name: str = "", **_: object) -> "NotingHandle":
        return NotingHandle(self.noted, method_name or self.method_name)

    def __getattr__(self, name: str) -> "NotingHandle":
        return self.options(method_name=name)

    def remote(self, **_: object) -> asyncio.Future:
        options = DynamicHandleOptions(method_name=self.method_name)
        self.noted.append(get_request_metadata(InitHandleOptions.create(), options))
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class FakeHandle:
    """Answers by one engine after another."""

    def __init__(self, *text_identities: str) -> None:
        self.left = [ModelInfo("m", 64, 257, text_identity=text_identity) for text_identity in text_identities]
        self.describe = SimpleNamespace(remote=self._describe)

    def options(self, **_: object) -> "FakeHandle":
        return self

    async def _describe(self) -> ModelInfo:
        return self.left.pop(0)


def test_a_new_router_waits_for_an_engine_of_its_own_settings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(serve_engines, "ASK_AGAIN_S", 0.0)
    handle = FakeHandle("old", "old", "new", "new")
    info = asyncio.run(ServeEngines(handle, "new").describe())
    assert info.text_identity == "new"
    assert len(handle.left) == 1
    assert [record.getMessage() for record in caplog.records] == ["Waiting for an engine of new: one has old"]


def test_calls_of_one_http_request_are_requests_of_their_own_to_serve():
    """Two of one id that wait at the same time keep Serve's request router busy for ever."""
    noted: list[RequestMetadata] = []

    async def scenario() -> None:
        _set_request_context(request_id="asked", _internal_request_id="of the HTTP request", route="/v1/models")
        engines = ServeEngines(NotingHandle(noted), "x")
        for name in CALLS:
            await asyncio.gather(*(engines.call("engine", name, argument=()) for _ in "ab"))

    asyncio.run(scenario())
    assert [one.call_method for one in noted[::2]] == CALLS
    ids = [one.internal_request_id for one in noted]
    assert len(set(ids)) == len(ids)
    assert "of the HTTP request" not in ids


def test_routers_and_verifiers_make_calls_of_serve_nowhere_else():
    folder = Path(serve_engines.__file__).parents[1]
    sources = [*folder.glob("fleet/*.py"), *folder.glob("api/**/*.py"), *folder.glob("*/pool_drafter.py")]
    assert len(sources) > 40
    assert [path.name for path in sources if ".remote(" in path.read_text()] == []
