"""Streams that have nothing to do with what is thrown at the server, and must not notice it."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from .client import Address, completion, send

TIMEOUT_S = 300.0
"""Many tokens on a busy machine."""
PROMPTS = (
    "def parse(lines):\n    ",
    "class Queue:\n    def __init__(self):\n        ",
    "import os\n\n\ndef main():\n    ",
)


async def text_of(address: Address, prompt: str, max_tokens: int, seed: int = 11) -> str:
    """The text of one stream, sampled, so that a token of somebody else's would show."""
    fields = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0.8, "seed": seed}
    answer = await send(address, completion(**fields), TIMEOUT_S)
    assert not answer.hung, f"a bystander's stream stopped after {answer.body[-300:]!r}"
    assert answer.status == 200, f"a bystander was answered by {answer.status}: {answer.body[:300]!r}"
    events = answer.body.decode().split("\n\n")
    assert answer.complete, "a bystander's stream was cut off"
    assert events[-2:] == ["data: [DONE]", ""], f"a bystander's stream ends by {events[-3:]}"
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2])


_texts: dict[tuple[Address, str, int], str] = {}


async def _undisturbed(address: Address, prompt: str, max_tokens: int) -> str:
    """The text that a stream had when nothing else was going on."""
    key = address, prompt, max_tokens
    if key not in _texts:
        _texts[key] = await text_of(address, prompt, max_tokens)
    return _texts[key]


@asynccontextmanager
async def bystanders(address: Address, count: int = 2, max_tokens: int = 64) -> AsyncGenerator[None, None]:
    """Streams that follow each other while the block runs; each must have the text it had before the block.

    Raises:
        AssertionError: one had another text, or failed.
    """
    prompts = PROMPTS[:count]
    expected = [await _undisturbed(address, prompt, max_tokens) for prompt in prompts]
    over = asyncio.Event()

    async def stand_by(place: int) -> None:
        while True:
            assert await text_of(address, prompts[place], max_tokens) == expected[place], "a bystander's text changed"
            if over.is_set():
                return

    tasks = [asyncio.create_task(stand_by(place)) for place in range(count)]
    try:
        yield
    finally:
        over.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if result is not None:
            raise result
