"""Bodies of both endpoints: valid ones with every served field, and changes that make most of them wrong."""

from collections.abc import Callable
from random import Random
from typing import Any

from tests.optional import kept

from .case import Object, Raw
from .contract import (
    CHAT_NO_OPS,
    CHAT_TEMPLATE_FIELDS,
    COMPLETION_NO_OPS,
    COMPLETIONS,
    CONTEXT,
    MESSAGE_FIELDS,
    MESSAGE_UNSERVED,
    MODEL,
    NO_OPS,
    VOCAB_SIZE,
)
from .sampling_bodies import HOSTILE, SAMPLING, add_sampling, spoil_sampling
from .values import NUMBERS, STRINGS, hostile, printable, string

WORDS = (
    "import os\n",
    "def main():\n    ",
    "class Stack:\n",
    "for i in range(3):\n",
    "return x\n",
    "x = 1\n",
    "<|endoftext|>",
)

HONOURED: dict[str, Callable[[Random], Any]] = {
    "temperature": lambda r: r.choice((0, 0, Raw("-0.0"), Raw("1e-45"), 9e-6, 1e-5, 0.3, 1, 2, Raw("2.0"), None)),
    "top_p": lambda r: r.choice((1, 0.9, 0.5, 1e-9, Raw("5e-324"), None)),
    "top_k": lambda r: r.choice((-1, 0, 1, 5, VOCAB_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1, None)),
    "min_p": lambda r: r.choice((0, 0.05, 1, 1e-300, None)),
    "seed": lambda r: r.choice((0, -1, 2**53 + 1, 2**63 - 1, -(2**63), r.randrange(2**63), None)),
    "stop": lambda r: r.choice(
        (None, [], "\n", " ", ["e", "qqq"], "x" * 1024, ["\x00"] * 16, [printable(r)], ["é", "\U0001f600"])
    ),
    "n": lambda r: r.choice((1, 1, 2, 3, 4, None)),
    "ignore_eos": lambda r: r.choice((True, True, False, None)),
    "speculation": lambda r: r.choice(
        ({"enabled": True}, {"enabled": False}, {"trace": r.random() < 0.5}, {"force": r.random() < 0.5}, {}, None)
    ),
    **kept({"prefix": lambda r: None}),
    "user": printable,
    "metadata": lambda r: {printable(r): printable(r)},
}
STREAMS = (
    None,
    {},
    {"include_usage": True},
    {"include_usage": False},
    {"include_usage": None},
    {"include_obfuscation": False},
    {"continuous_usage_stats": True},
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": True, "continuous_usage_stats": False},
)


def completion_body(rng: Random) -> Object:
    """A valid body of `/v1/completions`; few tokens to write."""
    fields = _common(rng, {**NO_OPS, **COMPLETION_NO_OPS})
    fields.set("prompt", _prompt(rng))
    if rng.random() < 0.9:
        fields.set("max_tokens", rng.randint(1, 8))
    if rng.random() < 0.2:
        fields.set("echo", rng.choice((True, False, None)))
    if fields.get("echo") and rng.random() < 0.3:
        fields.set("max_tokens", 0)
    if rng.random() < 0.1:
        fields.set("best_of", fields.get("n"))
    add_sampling(rng, fields, COMPLETIONS)
    rng.shuffle(fields)
    return fields


def chat_body(rng: Random) -> Object:
    """A valid body of `/v1/chat/completions`; always with a limit, as the context is the default."""
    fields = _common(rng, {**NO_OPS, **CHAT_NO_OPS})
    fields.set("messages", [_message(rng) for _ in range(rng.choice((1, 1, 2, 5)))])
    fields.set(rng.choice(("max_tokens", "max_completion_tokens")), rng.randint(1, 8))
    for name in ("prompt_cache_key", "prompt_cache_retention", "safety_identifier"):
        if rng.random() < 0.05:
            fields.set(name, "24h")
    for name, values in CHAT_TEMPLATE_FIELDS.items():
        if rng.random() < 0.05:
            fields.set(name, rng.choice(values))
    add_sampling(rng, fields, "")
    rng.shuffle(fields)
    return fields


def _common(rng: Random, no_ops: dict[str, tuple[Any, ...]]) -> Object:
    fields = Object()
    if rng.random() < 0.8:
        fields.set("model", MODEL)
    for name, value in HONOURED.items():
        if rng.random() < 0.3:
            fields.set(name, value(rng))
    for name in rng.sample(sorted(no_ops), rng.choice((0, 0, 1, 3))):
        fields.set(name, rng.choice(no_ops[name]))
    if rng.random() < 0.35:
        fields.set("stream", True)
        if rng.random() < 0.6:
            fields.set("stream_options", rng.choice(STREAMS))
    elif rng.random() < 0.2:
        fields.set("stream", rng.choice((False, None)))
    return fields


def _text(rng: Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6))) + (printable(rng) if rng.random() < 0.3 else "")


def _ids(rng: Random) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 2, 15, 16, 17, 60)))]


def _prompt(rng: Random) -> Any:
    kind = rng.random()
    if kind < 0.6:
        return _text(rng)
    if kind < 0.75:
        return _ids(rng)
    return [_text(rng) if kind < 0.9 else _ids(rng) for _ in range(rng.randint(1, 3))]


def _message(rng: Random) -> Object:
    content: Any = _text(rng)
    if rng.random() < 0.2:
        content = [{"type": "text", "text": _text(rng)} for _ in range(rng.randint(1, 3))]
    message = Object([("role", rng.choice(("user", "user", "system", "developer", "assistant"))), ("content", content)])
    if rng.random() < 0.1:
        message.set("name", printable(rng))
    return message


def mutate(rng: Random, fields: Object, target: str) -> None:
    """Change one thing about a valid body."""
    rng.choice(
        (
            *(_any_field, _any_field, _any_field, spoil_sampling, spoil_sampling, spoil_sampling),
            *(_number, _extra, _twice, _lose, _prompts, _limits, _streams, _stops),
        )
    )(rng, fields, target)


def _any_field(rng: Random, fields: Object, target: str) -> None:
    own = COMPLETION_NO_OPS if target == COMPLETIONS else (*CHAT_NO_OPS, *CHAT_TEMPLATE_FIELDS)
    name = rng.choice(
        (*HONOURED, *SAMPLING, *HOSTILE, *NO_OPS, *own, "model", "stream", "echo", "prompt", "messages", "best_of")
    )
    fields.set(name, hostile(rng))


def _number(rng: Random, fields: Object, target: str) -> None:
    name = rng.choice(("temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of"))
    fields.set(name, rng.choice(NUMBERS))


def _extra(rng: Random, fields: Object, target: str) -> None:
    names = (
        "Model",
        "max_token",
        "functionz",
        "__proto__",
        "__class__",
        "constructor",
        "model ",
        "",
        "prompt\x00",
        "1",
    )
    foreign = {**COMPLETION_NO_OPS, **CHAT_NO_OPS, **CHAT_TEMPLATE_FIELDS}
    name = rng.choice((*names, *foreign, string(rng), "max_completion_tokens"))
    fields.append((name, rng.choice((hostile(rng), None, 0, False, *foreign.get(name, ())))))


def _twice(rng: Random, fields: Object, target: str) -> None:
    place = rng.randrange(len(fields))
    name, value = fields[place]
    if rng.random() < 0.3:
        fields[place] = (name, Object([("a", 1), ("b", Object([("c", 1), ("c", 1)]))]))
    else:
        fields.insert(rng.randrange(len(fields)), (name, rng.choice((value, None, hostile(rng)))))


def _lose(rng: Random, fields: Object, target: str) -> None:
    if target == COMPLETIONS or rng.random() < 0.5:
        fields.drop(rng.choice(("prompt", "model", "messages")))
    else:
        fields.set("max_tokens", rng.choice((1, 9)))
        fields.set("max_completion_tokens", rng.choice((1, 9)))


def _prompts(rng: Random, fields: Object, target: str) -> None:
    if target != COMPLETIONS:
        fields.set("messages", _bad_messages(rng))
        return
    ids = [rng.randrange(VOCAB_SIZE)] * rng.choice((CONTEXT - 9, CONTEXT - 1, CONTEXT, CONTEXT + 1, 20_000))
    edges = [
        -1,
        VOCAB_SIZE - 1,
        VOCAB_SIZE,
        2**31,
        2**63,
        2**64,
        Raw("1.0"),
        True,
        None,
        "1",
        [1],
        Raw("-0"),
        Raw("1e2"),
    ]
    prompts = (
        "",
        [],
        [[]],
        [""],
        ["a", ""],
        [[1], []],
        [1, rng.choice(edges)],
        [[1], [rng.choice(edges)]],
        ids,
        [[1], ids],
    )
    long = (" a" * rng.choice((1000, 3000, 50_000)), ["x"] * rng.choice((2, 127, 128, 129, 5000)), rng.choice(STRINGS))
    fields.set("prompt", rng.choice((*prompts, *long)))
    if len(fields.get("prompt") or "") >= 100:
        fields.set("max_tokens", 1)


def _bad_messages(rng: Random) -> Any:
    good = _message(rng)
    name, value = rng.choice(
        (
            *(("role", role) for role in ("tool", "function", "root", "User", "", None, 1, ["user"])),
            *(("content", content) for content in (None, "", [], 1, {}, ["a"], [{}], [{"type": "text"}], " a" * 3000)),
            (
                "content",
                [{"type": rng.choice(("image_url", "input_audio", "file", "refusal", "Text", 1)), "text": "a"}],
            ),
            ("content", [{"type": "text", "text": rng.choice((1, None, "", ["a"])), "x": 1}]),
            ("content", [{"type": "text", "text": string(rng)}]),
            ("content", string(rng)),
            *((name, hostile(rng)) for name in (*MESSAGE_UNSERVED, *MESSAGE_FIELDS)),
            *((name, hostile(rng)) for name in ("name", "colour", "role", "content")),
        )
    )
    good.set(name, value)
    return rng.choice(([good], [good], [_message(rng), good], [], [[]], ["hi"], [None], {"role": "user"}, "hi", None))


def _limits(rng: Random, fields: Object, target: str) -> None:
    """Limits that are reached or crossed; what is allowed stays cheap."""
    name = rng.choice(("max_tokens", "max_completion_tokens")) if target != COMPLETIONS else "max_tokens"
    over = (
        0,
        -1,
        CONTEXT,
        CONTEXT + 1,
        2**31 - 1,
        2**31,
        2**63,
        2**64,
        Raw("1" + "0" * 400),
        Raw("1e308"),
        True,
        "8",
        [8],
    )
    if rng.random() < 0.6:
        fields.set(name, rng.choice((*over, Raw("4.0"), Raw("1e0"), Raw("0.5"), Raw("5e-324"))))
        return
    fields.set("n", rng.choice((0, -1, 5, 129, 2**31, 2**64, 128 if rng.random() < 0.1 else 12)))
    fields.drop("best_of")
    for limit in ("max_tokens", "max_completion_tokens"):
        if fields.get(limit) is not None:
            fields.set(limit, 1)
    if rng.random() < 0.3:
        fields.set("best_of", rng.choice((1, 2, 0, -1, 20)))


def _streams(rng: Random, fields: Object, target: str) -> None:
    fields.set("stream", rng.choice((True, True, True, False, None, "true", 1)))
    odd = (
        {"include_usage": "yes"},
        {"include_usage": 1},
        {"include_obfuscation": True},
        {"continuous_usage_stats": True},
    )
    fields.set("stream_options", rng.choice((*odd, *STREAMS, [], "x", {"a": 1}, True, {"include_usage": True, "": 1})))


def _stops(rng: Random, fields: Object, target: str) -> None:
    lists = (["a"] * 16, ["a"] * 17, [""], ["a", ""], ["x" * 1024] * 16, ["x" * 1025], [1], [None], [["a"]], ["\ud800"])
    fields.set(
        "stop", rng.choice((*lists, "", "x" * 1025, "é" * 1024, "\U0001f600" * 512, 1, {}, True, "\x00", string(rng)))
    )
