"""The document's rules for the fields that shape what is generated and what is reported of it."""

import json
from collections.abc import Callable
from typing import Any

from .contract import (
    BAD_GRAMMARS,
    GOOD_GRAMMARS,
    GRAMMAR_KINDS,
    HAS_GRAMMARS,
    MAX_ALLOWED,
    MAX_BAD_CHARS,
    MAX_GRAMMAR_CHARS,
    MAX_LISTED,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    VOCAB_SIZE,
)
from .findings import ANY_FAULT, INT32, Findings, flag, is_number, share, whole
from .json_reading import LONE


def _token_ids(most: int, least: int = 0) -> Callable[[Findings, str, Any], None]:
    def judge(found: Findings, name: str, value: Any) -> None:
        if not isinstance(value, list) or not least <= len(value) <= most:
            found.wrong(name)
        for item in value if isinstance(value, list) else ():
            if type(item) is float and item == int(item) and 0 <= item < VOCAB_SIZE:
                found.open(name)
            elif type(item) is not int or not 0 <= item < VOCAB_SIZE:
                found.wrong(name)

    return judge


def _logit_bias(found: Findings, name: str, value: Any) -> None:
    if not isinstance(value, dict) or len(value) > MAX_LISTED:
        found.wrong(name)
        return
    for key, bias in value.items():
        is_id = key.isascii() and key.isdigit() and str(int(key[:20])) == key and int(key) < VOCAB_SIZE
        if not is_id or not is_number(bias) or not -100 <= bias <= 100:
            found.wrong(name)


def _bad_words(found: Findings, name: str, value: Any) -> None:
    if (
        not isinstance(value, list)
        or len(value) > MAX_LISTED
        or not all(map(_is_word, value))
        or sum(map(len, value)) > MAX_BAD_CHARS
    ):
        found.wrong(name)


def _is_word(value: Any) -> bool:
    is_text = isinstance(value, str) and bool(value.strip()) and len(value) <= MAX_STOP_CHARS
    return is_text and not LONE.search(value)


def _salt(found: Findings, name: str, value: Any) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= 1024 or LONE.search(value):
        found.wrong(name)


def _structured(found: Findings, name: str, value: Any) -> None:
    if _is_one_of(value, GOOD_GRAMMARS):
        return
    if _is_one_of(value, BAD_GRAMMARS) or not isinstance(value, dict):
        found.wrong(name)
        return
    # Only llguidance decides which grammars compile.
    found.open(name, *ANY_FAULT)
    given = {key: item for key, item in value.items() if item is not None}
    if len(given) != 1 or not value.keys() <= set(GRAMMAR_KINDS):
        found.wrong(name, *ANY_FAULT)
        return
    ((kind, item),) = given.items()
    has_form = {
        "json": isinstance(item, str | dict),
        "structural_tag": isinstance(item, str | dict),
        "choice": _is_choice(item),
        "json_object": item is True,
    }.get(kind, isinstance(item, str))
    if not has_form or len(item if isinstance(item, str) else json.dumps(item, default=str)) > MAX_GRAMMAR_CHARS:
        found.wrong(name)


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether it is one of them, true and 1 told apart."""
    return json.dumps(value, default=str) in map(json.dumps, values)


def _is_choice(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) and item for item in value)


def _format(found: Findings, name: str, value: Any) -> None:
    if value in ({"type": "text"}, {"type": "json_object"}):
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema", "structural_tag"):
        found.wrong(name, *ANY_FAULT)
        return
    found.open(name, *ANY_FAULT)
    named = {key: item for key, item in value.items() if key != "type" and item is not None}
    if kind == "json_schema":
        schema = named.get("json_schema")
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            found.wrong(name, *ANY_FAULT)
        elif len(json.dumps(schema["schema"], default=str)) > MAX_GRAMMAR_CHARS or _is_one_of(
            {"json": schema["schema"]}, BAD_GRAMMARS
        ):
            found.wrong(name)
    elif kind != "structural_tag" and ("json_schema" in named or (kind == "json_object" and "schema" in named)):
        found.wrong(name, *ANY_FAULT)


def _logprobs(found: Findings, name: str, value: Any) -> None:
    if value is not False:
        whole(0, MAX_LOGPROBS)(found, name, value)


SAMPLING: dict[str, Callable[[Findings, str, Any], None]] = {
    "presence_penalty": share(-2, 2),
    "frequency_penalty": share(-2, 2),
    "repetition_penalty": share(0.01, 100),
    "logit_bias": _logit_bias,
    "allowed_token_ids": _token_ids(MAX_ALLOWED, 1),
    "bad_words": _bad_words,
    "min_tokens": whole(0, INT32),
    "stop_token_ids": _token_ids(MAX_LISTED),
    "include_stop_str_in_output": flag,
    "skip_special_tokens": flag,
    "add_special_tokens": flag,
    "return_token_ids": flag,
    "return_tokens_as_token_ids": flag,
    "prompt_logprobs": whole(0, MAX_LOGPROBS),
    "truncate_prompt_tokens": whole(-1, INT32),
    "priority": whole(-(2**31), INT32),
    "cache_salt": _salt,
    **({"structured_outputs": _structured, "response_format": _format} if HAS_GRAMMARS else {}),
}
COMPLETION = {"logprobs": _logprobs}
CHAT = {"logprobs": flag, "top_logprobs": whole(0, MAX_LOGPROBS)}


def judge_together(found: Findings, body: dict[str, Any], is_chat: bool) -> None:
    """Rules on several of these fields."""
    least = body.get("min_tokens")
    if is_number(least) and least > 0:
        limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if is_number(body.get(name))]
        if any(least > limit for limit in limits) or (not limits and not is_chat and least > 16):
            found.wrong("min_tokens")
        elif not limits:
            # The rest of the context may be less.
            found.open("min_tokens")
    structured, form = body.get("structured_outputs"), body.get("response_format")
    if HAS_GRAMMARS and structured is not None and isinstance(form, dict) and form.get("type") != "text":
        found.wrong("structured_outputs", *ANY_FAULT)
    if is_chat and is_number(body.get("top_logprobs")) and body["top_logprobs"] and body.get("logprobs") is not True:
        found.wrong("top_logprobs")
