"""A router's view of Serve's replicas while an application is updated; no Ray."""

import asyncio
from types import SimpleNamespace

import pytest

from wingbeat.deployments.fleet import serve_engines
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.fleet.serve_engines import ServeEngines


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
