"""A router pushes weights: all replicas look at a folder, then one after another takes it."""

import asyncio
from typing import Any

import pytest

from wingbeat.deployments.fleet.interface import EngineUnavailable
from wingbeat.deployments.weights.push import FleetWeights, Refusal, Weights, WeightsConflict, WeightsRefused

FOUND = Weights("d1", "/step-1")


class Replicas:
    """Replicas with set weights and answers to a push; counts how many take it at once."""

    def __init__(self, *names: str) -> None:
        self.found: dict[str, tuple[Weights, str | None]] = {name: (FOUND, None) for name in names}
        self.answers: dict[str, Any] = dict.fromkeys(names)
        self.served = {name: Weights() for name in names}
        self.taking, self.most_taking = 0, 0
        self.comes: str | None = None
        """A replica that is there once another one has taken the weights."""
        self.fleet = FleetWeights(self.call, lambda: frozenset(self.answers))

    async def call(
        self, engine_id: str, name: str, *, works: bool = False, operation: str, arguments: dict[str, Any]
    ) -> Any:
        assert name == "ask"
        if operation == "weights":
            return {"weights": self.served[engine_id].digest or None}
        assert works, "it may take its time"
        if operation == "inspect_weights":
            return self.found[engine_id]
        self.taking += 1
        self.most_taking = max(self.most_taking, self.taking)
        await asyncio.sleep(0.01)
        self.taking -= 1
        answer = self.answers[engine_id]
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            self.served[engine_id] = arguments["weights"]
            if self.comes is not None:
                self.answers[self.comes], self.served[self.comes], self.comes = None, Weights(), None
        return answer

    def digests(self) -> list[str]:
        return [weights.digest for _, weights in sorted(self.served.items())]

    def push(self, expected: type[Exception] | None = None, match: str = "^") -> None:
        pushing = self.fleet.push("/step-1", 5.0)
        if expected is None:
            asyncio.run(pushing)
        else:
            with pytest.raises(expected, match=match):
                asyncio.run(pushing)


def test_replicas_take_them_one_at_a_time_by_one_version_those_that_come_meanwhile_too():
    replicas = Replicas("a", "b")
    replicas.comes = "c"
    replicas.push()
    assert (replicas.digests(), replicas.most_taking) == (["d1"] * 3, 1)
    (weights,) = set(replicas.served.values())
    assert weights.version > 10**18
    assert asyncio.run(replicas.fleet.described()) == {name: {"weights": "d1"} for name in "abc"}


def test_where_one_of_them_cannot_serve_them_none_is_asked_to():
    replicas = Replicas("a", "b")
    replicas.found["b"] = (Weights(), "a tensor is missing")
    replicas.push(WeightsRefused, "^a tensor is missing$")
    replicas.found["b"] = (Weights("d2", "/step-1"), None)
    replicas.push(WeightsRefused, "differ from machine to machine")
    assert (replicas.digests(), replicas.most_taking) == (["", ""], 0)


def test_the_first_refusal_ends_a_push_and_says_how_far_it_has_come():
    replicas = Replicas("a", "b", "c")
    replicas.answers["a"] = Refusal("2 requests have not ended")
    replicas.push(WeightsConflict, "^2 requests have not ended$")
    assert replicas.digests() == ["", "", ""]
    replicas.answers |= {"a": None, "b": Refusal("no engine starts with it", is_of_folder=True)}
    replicas.push(WeightsRefused, "^no engine starts with it; 1 of 3 engines have the new weights: push again$")
    assert replicas.digests() == ["d1", "", ""]
    replicas.answers["b"] = None
    replicas.push()
    assert replicas.digests() == ["d1"] * 3


def test_a_replica_that_does_not_answer_is_an_error_and_one_that_is_gone_is_not_missed():
    replicas = Replicas("a", "b")
    replicas.answers["b"] = ConnectionError("lost")
    replicas.push(EngineUnavailable, "Engine b was lost before it answered")
    del replicas.answers["b"], replicas.served["b"]
    replicas.push()
    del replicas.answers["a"]
    replicas.push(EngineUnavailable)


def test_there_is_one_push_at_a_time_and_it_goes_on_when_its_caller_leaves():
    replicas = Replicas("a", "b")

    async def scenario() -> None:
        first = asyncio.create_task(replicas.fleet.push("/step-1", 5.0))
        await asyncio.sleep(0.005)
        with pytest.raises(WeightsConflict, match="another push of weights is running"):
            await replicas.fleet.push("/step-2", 5.0)
        first.cancel()
        await asyncio.wait([replicas.fleet._pushing])

    asyncio.run(scenario())
    assert replicas.digests() == ["d1", "d1"]
