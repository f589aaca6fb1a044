"""A replica's engines around updates: the calls that they get, and when they take requests."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.refused_models.cluster_memory import ClusterMemory
from wingbeat.deployments.rollouts import replica_rollouts
from wingbeat.deployments.rollouts.replica_rollouts import ReplicaRollouts
from wingbeat.deployments.rollouts.wire import Finished, OperationResult
from wingbeat.runtime.rollouts.shared_tensors import shared_file


class Memory(ClusterMemory):
    """The cluster's memory, in this process."""

    def __init__(self, kept: dict[bytes, str]) -> None:
        super().__init__(None)
        self.kept = kept

    async def read(self, kind: bytes, name: str = "") -> str | None:
        return self.kept.get(kind)

    async def write(self, kind: bytes, value: str, name: str = "") -> None:
        self.kept[kind] = value


class Client:
    """An engine with scripted answers."""

    failure = None

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple]] = []
        self.answers: dict[str, OperationResult] = {}
        self.takes, self.weights = True, ""
        self.files: dict[str, torch.Tensor] = {}

    async def call(self, name: str, operation: str, arguments: tuple) -> OperationResult:
        self.calls.append((operation, arguments))
        if operation == "update_weights" and "files" in arguments[0]:
            self.files = load_file(arguments[0]["files"][0])
        return self.answers.get(operation, OperationResult())

    def hold(self) -> None:
        self.takes = False

    def release(self) -> None:
        self.takes = True

    def renew(self, weights: str) -> None:
        self.weights = weights


class Life:
    """An engine's life."""

    def __init__(self) -> None:
        self.client = Client()

    async def start(self) -> None:
        pass

    async def end(self) -> None:
        pass


async def started(kept: dict[bytes, str]) -> tuple[ReplicaRollouts, Client]:
    replica = ReplicaRollouts(AppConfig(drafter="none"), Memory(kept), lambda config, weights: Life())
    await replica.start()
    return replica, replica.engines.client


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_an_engine_without_weights_of_one_update_takes_no_requests():
    async def test() -> None:
        replica, client = await started({})
        client.answers["abandon_update"] = OperationResult(serves=False)
        await replica.run("abandon_update")
        assert not client.takes
        client.answers["finish_update"] = OperationResult(Finished(3))
        await replica.run("finish_update", weights="w")
        assert client.takes

    run(test())


def test_an_engine_that_starts_behind_an_update_has_lost_its_weights():
    async def test() -> None:
        kept: dict[bytes, str] = {}
        replica, client = await started(kept)
        assert client.calls == []
        client.answers["finish_update"] = OperationResult(Finished(3))
        await replica.run("finish_update", (None, False), weights="w")
        assert client.weights == "w"
        later, another = await started(kept)
        assert (another.calls, another.takes) == ([("lose_weights", ())], False)
        life = replica._launch()
        await life.start()
        assert life.client.calls == [("lose_weights", ())]
        assert (await later.card())["weights"] is None

    run(test())


@pytest.mark.parametrize(
    "told",
    [OperationResult(refused="x"), OperationResult(conflict="x"), OperationResult(Finished(1, of_head=True))],
    ids=["refused", "early", "head"],
)
def test_the_weights_stay_where_no_update_of_them_is_finished(told: OperationResult):
    async def test() -> None:
        kept: dict[bytes, str] = {}
        replica, client = await started(kept)
        client.answers["finish_update"] = told
        await replica.run("finish_update", weights="w")
        assert (client.weights, kept) == ("", {})

    run(test())


def test_an_update_whose_trainer_is_silent_is_given_up_and_one_that_goes_on_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replica_rollouts, "SILENCE_S", 0.2)

    async def test() -> None:
        replica, client = await started({})
        for name in ("start_update", "update_weights", "is_paused"):
            client.answers[name] = OperationResult(is_open=True)
        await replica.run("start_update")
        for _ in range(4):
            await asyncio.sleep(0.1)
            await replica.run("update_weights", ({},))
        assert "abandon_update" not in [name for name, _ in client.calls]
        for _ in range(4):
            await asyncio.sleep(0.1)
            await replica.run("is_paused")
        assert "abandon_update" in [name for name, _ in client.calls]

    run(test())


def test_tensors_reach_the_engine_in_shared_memory():
    async def test() -> None:
        replica, client = await started({})
        tensors = {"a": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(), "b": torch.ones(3).numpy()}
        await replica.run("update_weights", tensors=tensors)
        assert client.files["a"].tolist() == tensors["a"].tolist()
        assert client.files["b"].tolist() == [1.0] * 3
        told = await replica.run("update_weights", tensors={"a": torch.ones(2, dtype=torch.int64)})
        assert told.refused == "a is int64: weights are floats"

    run(test())


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (3, "tensors must be given by name, and not as int"),
        ({"a": object()}, "a is no tensor of numbers: Could not infer dtype of object"),
        ({"a": [[1.0], [1.0, 2.0]]}, "a is no tensor of numbers: expected sequence of length 1"),
        ({"a": torch.ones(2, device="meta")}, "a is no tensor of numbers: Cannot copy out of meta tensor"),
        ({"a": torch.eye(2).to_sparse()}, "a is no tensor of numbers: "),
    ],
    ids=["number", "object", "ragged", "meta", "sparse"],
)
def test_what_a_replica_refuses_leaves_its_engine_closed_and_its_update_open(tensors: Any, reason: str):
    async def test() -> None:
        replica, client = await started({})
        client.answers["start_update"] = client.answers["is_paused"] = OperationResult(True, serves=False, is_open=True)
        await replica.run("start_update")
        told = await replica.run("update_weights", tensors=tensors)
        assert told.refused.startswith(reason)
        assert (told.value, client.takes) == (None, False)
        assert replica._silence is not None, "nothing would end the update"

    run(test())


def test_references_that_cannot_be_fetched_are_refused():
    async def test() -> None:
        async def gone() -> None:
            raise ray.exceptions.ObjectLostError("ab" * 14, None, "")

        replica, _ = await started({})
        told = await replica.run("update_weights", tensors=gone())
        assert told.refused.startswith("tensors cannot be fetched: ")

    run(test())


def test_the_memory_of_shared_tensors_is_given_back():
    with shared_file({"a": torch.ones(3)}) as path:
        assert Path(path).exists()
    assert not Path(path).exists()


def test_a_folder_is_refused():
    async def test() -> None:
        replica, _ = await started({})
        assert (await replica.inspect("/step-1"))[1].startswith("rollouts is given")

    run(test())
