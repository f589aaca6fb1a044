"""A model that is refused is loaded once, however often Serve starts its replica."""

import asyncio

import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.weights import Weights
from wingbeat.deployments.replica.replica_weights import ReplicaWeights
from wingbeat.runtime.verifier_errors import UnsupportedModelError


class Store:
    """`ClusterStore` in this process."""

    def __init__(self) -> None:
        self.refusals: dict[str, str] = {}

    def read(self) -> Weights:
        return Weights()

    def write(self, weights: Weights) -> None:
        raise AssertionError("nothing was pushed")

    def refusal(self, digest: str) -> str | None:
        return self.refusals.get(digest)

    def refuse(self, digest: str, reason: str) -> None:
        self.refusals[digest] = reason


class Failing:
    """An engine that does not start."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def start(self) -> None:
        raise self.error

    async def end(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "num_launched"),
    [(UnsupportedModelError("its text would be wrong"), 1), (RuntimeError("the process was killed"), 2)],
    ids=["refused", "lost"],
)
def test_a_refused_model_is_not_loaded_for_the_next_replica(error: Exception, num_launched: int) -> None:
    store, launched = Store(), []

    def launch(config: AppConfig, digest: str) -> Failing:
        launched.append(digest)
        return Failing(error)

    for _ in range(2):
        replica = ReplicaWeights(AppConfig(), store, launch)
        with pytest.raises(type(error), match=str(error)):
            asyncio.run(replica.start())
    assert len(launched) == num_launched
