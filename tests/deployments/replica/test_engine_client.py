"""The replica's side of an engine, and the engine's faults that it must survive."""

import asyncio
import contextlib
import os

from wingbeat.cluster.channels.link import Link
from wingbeat.deployments.replica.engine.engine_messages import ToReplica
from wingbeat.deployments.replica.engine_client import EngineClient

PATIENCE_S = 10.0


def test_an_engine_that_starts_when_nobody_waits_for_it_any_more_is_still_listened_to():
    async def scenario() -> None:
        link = Link.create()
        engine = Link(*map(os.dup, link.child_fds), is_parent=False)
        client = EngineClient(link)
        start = asyncio.create_task(client.start(None))
        await asyncio.sleep(0)
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await start
        answer = client.call("figures")
        engine.send((ToReplica.STARTED, None))
        engine.send((ToReplica.FAILED, RuntimeError("it could not write its last file")))
        engine.send((ToReplica.RESULT, 0, "figures", None))
        assert await asyncio.wait_for(answer, PATIENCE_S) == "figures"
        client.lose("the test is over")
        engine.close()

    asyncio.run(scenario())
