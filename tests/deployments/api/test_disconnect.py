"""Clients that leave free their engines, and events are sent one by one."""

import asyncio
import json

import pytest

from tests.deployments.http_world import Connection, FakePool
from tests.deployments.pool_world import until


class TestDisconnect:
    @pytest.mark.parametrize("how", ["disconnect", "cancel"])
    @pytest.mark.parametrize("n", [1, 3])
    @pytest.mark.parametrize(("stream", "hang_after"), [(False, 2), (True, 0), (True, 2)])
    def test_a_client_that_leaves_frees_its_engines(self, how, n, stream, hang_after):
        async def scenario() -> FakePool:
            pool = FakePool()
            pool.hang_after = hang_after
            body = {"model": "demo", "prompt": "hi", "max_tokens": 40, "stream": stream, "n": n}
            connection = Connection(pool, body)
            task = asyncio.create_task(connection.run())
            await until(lambda: len(pool.running) == n)
            if stream and hang_after:
                await until(lambda: len(connection.sent) > hang_after)
            if how == "cancel":
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                connection.left.set()
                await asyncio.wait_for(task, 10)
            return pool

        pool = asyncio.run(scenario())
        assert not pool.running
        assert len(pool.aborted) == n

    def test_the_first_token_is_sent_before_the_second_exists(self):
        async def scenario() -> bytes:
            pool = FakePool(tokens_per_output=1)
            pool.hang_after = 1
            connection = Connection(pool, {"model": "demo", "prompt": "hi", "stream": True})
            task = asyncio.create_task(connection.run())
            await until(lambda: len(connection.sent) >= 2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return connection.sent[1]["body"]

        assert json.loads(asyncio.run(scenario()).removeprefix(b"data: "))["choices"][0]["text"] == "h"
