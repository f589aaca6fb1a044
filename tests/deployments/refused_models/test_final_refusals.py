"""A model that is refused is loaded once, however often Serve starts its replica."""

import asyncio

import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.refused_models.remembering_engines import RememberingEngines
from wingbeat.runtime.verifier_errors import UnsupportedModelError


class Memory:
    """`ClusterMemory` in this process."""

    def __init__(self) -> None:
        self.kept: dict[tuple[bytes, str], str] = {}

    async def read(self, kind: bytes, name: str = "") -> str | None:
        return self.kept.get((kind, name))

    async def write(self, kind: bytes, value: str, name: str = "") -> None:
        self.kept[kind, name] = value


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
    memory, launched = Memory(), []

    def launch(config: AppConfig, digest: str) -> Failing:
        launched.append(digest)
        return Failing(error)

    for _ in range(2):
        replica = RememberingEngines(AppConfig(), memory, launch)
        with pytest.raises(type(error), match=str(error)):
            asyncio.run(replica.start())
    assert len(launched) == num_launched
