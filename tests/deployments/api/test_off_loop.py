"""Huge inputs are worked on one at a time, whoever still waits for them."""

import asyncio
import threading

from wingbeat.deployments.api.prompts import HUGE, OffLoop


def test_huge_inputs_take_turns_and_others_do_not_wait():
    running, most, go_on = 0, 0, threading.Event()

    def work() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        go_on.wait(10)
        running -= 1
        return "done"

    async def scene() -> None:
        off_loop = OffLoop()
        tasks = [asyncio.create_task(off_loop.run(HUGE + 1, work)) for _ in range(4)]
        await asyncio.sleep(0.05)
        assert await off_loop.run(HUGE, str, 5) == "5"
        assert await off_loop.run(1, threading.get_ident) == threading.get_ident()
        # Its thread goes on, and so does its turn.
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        assert (running, most) == (1, 1)
        go_on.set()
        assert await asyncio.gather(*tasks[1:]) == ["done"] * 3

    asyncio.run(scene())
    assert most == 1
