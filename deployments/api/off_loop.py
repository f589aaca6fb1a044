"""Work on long texts and bodies outside the event loop, so that other streams keep moving."""

import asyncio
import contextvars
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from wingbeat.runtime.tokenizer import LONG_TEXT_CHARS

HUGE = 2**18
"""Characters, tokens or bytes. What is made of so many can take a hundred times their memory for a moment."""

Made = TypeVar("Made")


class OffLoop:
    """Runs functions in threads; of those with a huge input one at a time, which leaves no memory behind."""

    def __init__(self) -> None:
        # One thread has one of the allocator's arenas, each of which would keep the most that it ever held.
        self._huge = ThreadPoolExecutor(1, "huge")

    async def run(self, size: int, function: Callable[..., Made], *arguments, long: int = LONG_TEXT_CHARS) -> Made:
        """The function's result; with an input of up to `long` it is called here.

        A huge input whose turn has not come is dropped with whoever waits for it.
        """
        if size <= long:
            return function(*arguments)
        if size <= HUGE:
            return await asyncio.to_thread(function, *arguments)
        context = contextvars.copy_context()
        return await asyncio.wrap_future(self._huge.submit(context.run, _trimmed, function, *arguments))


def _trimmed(function: Callable[..., Made], *arguments) -> Made:
    try:
        return function(*arguments)
    finally:
        _give_back()


def _give_back() -> None:
    """Return freed memory to the system, where the C library is one that keeps it: glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
