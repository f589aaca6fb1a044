"""Bodies as large as anybody cares to send: refused by size or by rule, and others go on."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from .bystander import bystanders
from .client import completion, health, send
from .contract import CHAT, MAX_BODY_BYTES, MODEL
from .memory import bounded_growth

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

MAX_GROWTH_BYTES = 300 * 10**6
MEGABYTE = 2**20
PROMPT = b'"prompt": "x", "max_tokens": 1'


def padded(num_bytes: int) -> bytes:
    """A valid body of this many bytes, most of them spaces."""
    body = b'{"model": "%s", %s}' % (MODEL.encode(), PROMPT)
    return body + b" " * (num_bytes - len(body))


def with_prompt(prompt: bytes) -> bytes:
    """A completion of a prompt."""
    return b'{"max_tokens": 1, "prompt": ' + prompt + b"}"


SIZES: dict[str, tuple[Callable[[], bytes], int, str | None, str | None]] = {
    "1-MiB": (lambda: padded(MEGABYTE), 200, None, None),
    "just-4-MiB": (lambda: padded(MAX_BODY_BYTES), 200, None, None),
    "above-4-MiB": (lambda: padded(MAX_BODY_BYTES + 1), 413, "body_too_large", None),
    "5-MiB": (lambda: padded(5 * MEGABYTE), 413, "body_too_large", None),
    "50-MiB": (lambda: padded(50 * MEGABYTE), 413, "body_too_large", None),
    "4-million-characters": (
        lambda: with_prompt(b'"%s"' % (b"a" * 4_000_000)),
        400,
        "context_length_exceeded",
        "prompt",
    ),
    "4-million-spaces": (lambda: with_prompt(b'"%s"' % (b" " * 4_000_000)), 400, "context_length_exceeded", "prompt"),
    "a-million-wide-characters": (
        lambda: with_prompt('"{}"'.format("\U0001f600" * 1_000_000).encode()),
        *(400, "context_length_exceeded", "prompt"),
    ),
    "a-million-token-ids": (
        lambda: with_prompt(b"[" + b"1," * 999_999 + b"1]"),
        400,
        "context_length_exceeded",
        "prompt",
    ),
    "a-million-prompts": (lambda: with_prompt(b"[" + b'"",' * 999_999 + b'"a"]'), 400, "invalid_json", None),
    "100-thousand-prompts": (lambda: with_prompt(b"[" + b'"abc",' * 99_999 + b'"a"]'), 400, "invalid_value", "prompt"),
    "100-thousand-keys": (
        lambda: b"{%s, %s}" % (PROMPT, b",".join(b'"k%d":1' % i for i in range(100_000))),
        *(200, None, None),
    ),
    "100-thousand-equal-keys": (lambda: b"{%s}" % b",".join([PROMPT] * 100_000), 400, "invalid_json", None),
    "a-million-lists-deep": (lambda: with_prompt(b"[" * 1_000_000 + b"]" * 1_000_000), 400, "invalid_json", None),
    "a-million-lists-open": (lambda: with_prompt(b"[" * 1_000_000), 400, "invalid_json", None),
    "a-million-objects-deep": (
        lambda: with_prompt(b'{"":' * 600_000 + b"1" + b"}" * 600_000),
        400,
        "invalid_json",
        None,
    ),
    "a-million-quotes": (lambda: with_prompt(b'"' * 1_000_001), 400, "invalid_json", None),
    "a-long-stop-string": (
        lambda: b'{%s, "stop": "%s"}' % (PROMPT, b"s" * 4_000_000),
        *(400, "invalid_value", "stop"),
    ),
    "a-million-stop-strings": (
        lambda: b'{%s, "stop": [%s"s"]}' % (PROMPT, b'"s",' * 900_000),
        *(400, "invalid_json", None),
    ),
}

IN_EVERY_RUN = ("just-4-MiB", "above-4-MiB", "a-million-token-ids")


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.slow) for name in SIZES]
)
def test_a_large_body_is_answered_by_its_rule_while_others_go_on(address, name):
    make, status, code, param = SIZES[name]
    case = replace(completion(), body=make())

    async def scene() -> None:
        async with bystanders(address, count=1, max_tokens=32):
            asked = [asyncio.create_task(send(address, case)) for _ in range(2)]
            while not all(task.done() for task in asked):
                assert (await send(address, health())).status == 200
            for task in asked:
                answer = task.result()
                assert not answer.hung
                assert answer.status == status, answer.body[:300]
                if code is not None:
                    error = json.loads(answer.body)["error"]
                    assert (error["code"], error["param"]) == (code, param)
                    assert len(answer.body) < 10_000, "an error does not repeat the request"

    with bounded_growth(MAX_GROWTH_BYTES):
        asyncio.run(scene())


@pytest.mark.slow
@pytest.mark.parametrize(("count", "code"), [(20_000, "context_length_exceeded"), (120_000, "invalid_json")])
def test_a_conversation_of_many_messages_is_refused(address, count, code):
    message = b'{"role":"user","content":"hi"}'
    body = b'{"max_tokens":1,"messages":[%s]}' % b",".join([message] * count)
    answer = asyncio.run(send(address, replace(completion(), target=CHAT, body=body)))
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, code)


def test_a_number_of_a_million_digits_is_refused(address):
    body = b'{%s, "seed": %s}' % (PROMPT, b"9" * 1_000_000)
    answer = asyncio.run(send(address, replace(completion(), body=body)))
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["param"] in ("seed", None)
