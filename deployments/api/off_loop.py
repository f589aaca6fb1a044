"""Work on long texts and bodies outside the event loop, so that other streams keep moving."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from wingbeat.runtime.tokenizer import LONG_TEXT_CHARS

HUGE = 2**18
"""Characters, tokens or bytes. What is made of so many can take a hundred times their memory for a moment."""

Made = TypeVar("Made")


class OffLoop:
    """Runs functions in threads; of those with a huge input one at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)

    async def run(self, size: int, function: Callable[..., Made], *arguments, long: int = LONG_TEXT_CHARS) -> Made:
        """The function's result; with an input of up to `long` it is called here."""
        if size <= long:
            return function(*arguments)
        if size <= HUGE:
            return await asyncio.to_thread(function, *arguments)
        await self._turn.acquire()
        try:
            work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
        except BaseException:
            self._turn.release()
            raise
        # A thread goes on when nobody waits for it any more, and so its turn does.
        work.add_done_callback(self._ended)
        return await asyncio.shield(work)

    def _ended(self, work: "asyncio.Future") -> None:
        self._turn.release()
        if not work.cancelled():
            work.exception()
