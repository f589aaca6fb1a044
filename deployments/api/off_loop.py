"""Work on long texts in a thread, so that other streams go on."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from wingbeat.deployments.api.requests import GenerationBody
from wingbeat.runtime.tokenizer import LONG_TEXT_CHARS

Body = TypeVar("Body", bound=GenerationBody)
Planned = TypeVar("Planned")


async def off_loop_if_long(size: int, function: Callable[[Body], Planned], body: Body) -> Planned:
    """The function's result; for a `size` of many characters or tokens it runs in a thread, for other streams' sake."""
    if size > LONG_TEXT_CHARS:
        return await asyncio.to_thread(function, body)
    return function(body)
