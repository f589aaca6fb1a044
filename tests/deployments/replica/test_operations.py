"""Operations that routers may call on an engine."""

import asyncio

import pytest

from tests.deployments.engine_world import ThreadedEngine
from tests.fakes import FakeEngine


@pytest.mark.parametrize("name", ["no_such", "__init__", "_engine"])
def test_what_is_no_operation_is_refused(name):
    async def scenario():
        one = ThreadedEngine(FakeEngine())
        try:
            with pytest.raises(ValueError, match=f"{name} is no operation of an engine: .*reset_prefix_cache"):
                await one.client.call("operate", name, ())
        finally:
            one.close()

    asyncio.run(scenario())
