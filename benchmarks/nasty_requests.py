"""Requests that are small to send and large to serve, one endless supply of each kind, for `memory_limit.py`."""

import asyncio
import base64
import itertools
import json
import random
import string
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

CONTEXT = 2048
"""The demo model's, in tokens."""
MEGABYTE = 2**20
SLOW_S = 20.0
"""How long a slow reader reads."""


class Nasty(NamedTuple):
    """One request."""

    path: str
    body: bytes | Callable[[], AsyncIterator[bytes]]
    """All of it, or pieces as they are sent."""
    read_s: float = 0.0
    """Seconds over which the answer is read a kilobyte at a time; 0 reads it at once."""


def _json(path: str, read_s: float = 0.0, **fields) -> Nasty:
    return Nasty(path, json.dumps(fields).encode(), read_s)


def _words(draw: random.Random, count: int) -> str:
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 9))) for _ in range(min(count, 200))]
    return " ".join(draw.choices(words, k=count))


def answers(draw: random.Random) -> Iterator[Nasty]:
    """A few kilobytes in, tens of megabytes out."""
    while True:
        ids = [draw.randrange(300, 4000) for _ in range(1000)]
        for slow in (0.0, SLOW_S):
            yield _json("/v1/completions", slow, prompt=ids, n=16, max_tokens=16, prompt_logprobs=20)
            yield _json("/v1/completions", slow, prompt=ids, n=16, max_tokens=16, logprobs=20, echo=True)
            yield _json("/v1/completions", slow, prompt=ids, n=8, max_tokens=200, speculation={"trace": True})
            yield _json("/v1/completions", slow, prompt=[ids] * 8, n=2, max_tokens=1, prompt_logprobs=20, stream=True)
            messages = [{"role": "user", "content": _words(draw, 200)}]
            yield _json("/v1/chat/completions", slow, messages=messages, n=8, logprobs=True, top_logprobs=20)
            yield _json("/v1/completions", slow, prompt=[ids] * 128, max_tokens=1, echo=True, return_token_ids=True)


def prompts(draw: random.Random) -> Iterator[Nasty]:
    """Long ones, new ones, many at once, and lists of everything."""
    while True:
        yield _json("/v1/completions", prompt=_words(draw, 600_000)[: 3 * MEGABYTE], max_tokens=1)
        yield _json("/v1/completions", prompt=[17] * 900_000, max_tokens=1)
        yield _json("/v1/completions", prompt=[_words(draw, 300) for _ in range(64)], max_tokens=4)
        yield _json(
            "/v1/completions", prompt="x", cache_salt=_words(draw, 100), max_tokens=CONTEXT - 8, ignore_eos=True
        )
        yield _json("/v1/completions", prompt="x", stop=[_words(draw, 150) for _ in range(16)], max_tokens=8)
        yield _json("/v1/completions", prompt="x", bad_words=[_words(draw, 2) for _ in range(1000)], max_tokens=8)
        bias = {str(token): draw.uniform(-5, 5) for token in draw.sample(range(4000), 1024)}
        yield _json("/v1/completions", prompt="x", logit_bias=bias, n=32, max_tokens=8)
        tools = [
            {"type": "function", "function": {"name": f"f{i}", "description": _words(draw, 20)}} for i in range(512)
        ]
        yield _json(
            "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], tools=tools, tool_choice="none"
        )


def texts(draw: random.Random) -> Iterator[Nasty]:
    """What is tokenized alone."""
    while True:
        yield _json("/tokenize", prompt=_words(draw, 600_000)[: 3 * MEGABYTE], return_token_strs=True)
        yield _json("/detokenize", tokens=[draw.randrange(4000) for _ in range(500_000)])
        yield _json("/tokenize", SLOW_S, prompt="a b" * MEGABYTE, return_token_strs=True)


def shapes(draw: random.Random) -> Iterator[Nasty]:
    """JSON that is deep, wide or no JSON, and images that are too large."""
    blank = zlib.compress(b"\0" * 30_000_000)
    head = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\x27\x10\0\0\x27\x10\x08\0\0\0\0"
    image = "data:image/png;base64," + base64.b64encode(head + blank).decode()
    part = {"type": "image_url", "image_url": {"url": image}}
    while True:
        yield Nasty("/v1/completions", b'{"prompt": ' + b"[" * MEGABYTE)
        yield Nasty("/v1/completions", b'{"prompt": ' + b'{"a":' * 60 + b"1" + b"}" * 60 + b"}")
        yield Nasty("/v1/completions", b"{" + b",".join(b'"k%d":1' % i for i in range(100_000)) + b"}")
        yield Nasty("/v1/completions", b'{"prompt": "' + b"\\ud83d" * 500_000 + b'"}')
        yield Nasty("/v1/completions", draw.randbytes(MEGABYTE))
        yield _json("/v1/chat/completions", messages=[{"role": "user", "content": [part] * 4}])


def bodies(draw: random.Random) -> Iterator[Nasty]:
    """Bodies that are too long, and bodies that hardly come."""

    async def long() -> AsyncIterator[bytes]:
        for _ in range(32):
            yield b" " * MEGABYTE

    async def slow() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 50_000
            await asyncio.sleep(0.5)

    for number in itertools.count():
        yield Nasty("/v1/completions", slow if number % 4 else long)


def grammars(draw: random.Random) -> Iterator[Nasty]:
    """Grammars that are small to write and large to follow."""
    chain = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40))
    while True:
        for grammar in ('root ::= "a" root', f'root ::= r0\n{chain}\nr40 ::= "a"', 'root ::= "a"{1000000}'):
            yield _json("/v1/completions", prompt="x", max_tokens=64, structured_outputs={"grammar": grammar})
        choices = [_words(draw, 3) for _ in range(1000)]
        yield _json("/v1/completions", prompt="x", max_tokens=64, structured_outputs={"choice": choices})


KINDS: dict[str, tuple[Callable[[random.Random], Iterator[Nasty]], int]] = {
    "answers": (answers, 16),
    "prompts": (prompts, 4),
    "texts": (texts, 3),
    "shapes": (shapes, 2),
    "bodies": (bodies, 24),
}
"""By name: their supply, and how many are under way at once."""
GRAMMARS = {"grammars": (grammars, 2)}
"""Likewise, only where they are asked for."""
