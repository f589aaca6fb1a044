"""The document's rules for the fields of a body, each as what may come back for a value.

See `Findings`.
"""

from collections.abc import Callable
from typing import Any

from tests.optional import kept

from . import sampling_rules
from .contract import (
    CHAT,
    CHAT_NO_OPS,
    CHAT_TEMPLATE_FIELDS,
    COMPLETION_NO_OPS,
    MAX_CHOICES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MESSAGE_FIELDS,
    MESSAGE_UNSERVED,
    MODEL,
    NO_OPS,
)
from .findings import ANY_FAULT, INT32, MALFORMED, UNSERVED, Findings, flag, is_number, share, whole
from .json_reading import LONE


def _seed(found: Findings, name: str, value: Any) -> None:
    if type(value) is int and 2**63 <= value < 2**64:
        found.open(name)
        return
    whole(-(2**63), 2**63 - 1)(found, name, value)


def _stop(found: Findings, name: str, value: Any) -> None:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(map(_is_stop, stops)):
        found.wrong(name)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_STOP_CHARS and not LONE.search(value)


def _speculation(found: Findings, name: str, value: Any) -> None:
    _object(found, name, value, {"enabled": flag, "trace": flag, "force": flag}, {})
    if isinstance(value, dict) and value.get("force") is True and value.get("enabled") is False:
        found.wrong(name)


def _prefix(found: Findings, name: str, value: Any) -> None:
    # No prefix is saved here.
    if isinstance(value, str):
        found.wrong(name, "prefix_not_found", status=404)
    else:
        found.wrong(name)


def _stream_options(found: Findings, name: str, value: Any) -> None:
    served = {"include_usage": flag, "continuous_usage_stats": flag}
    _object(found, name, value, served, {"include_obfuscation": (None, False)})


def _object(found: Findings, name: str, value: Any, served: dict[str, Any], no_ops: dict[str, tuple[Any, ...]]) -> None:
    if not isinstance(value, dict):
        found.wrong(name)
        return
    for key, item in value.items():
        if key in served:
            if item is None:
                found.open(name)
            else:
                served[key](found, name, item)
        elif key in no_ops and not _is_no_op(item, no_ops[key]):
            found.wrong(name, *UNSERVED, *MALFORMED)


HONOURED: dict[str, Callable[[Findings, str, Any], None]] = {
    "max_tokens": whole(1, INT32),
    "temperature": share(0, 2),
    "top_p": share(0, 1, above=True),
    "top_k": whole(-1, INT32),
    "min_p": share(0, 1),
    "seed": _seed,
    "stop": _stop,
    "n": whole(1, MAX_CHOICES),
    "stream": flag,
    "stream_options": _stream_options,
    "ignore_eos": flag,
    "speculation": _speculation,
    **kept({"prefix": _prefix}),
    **sampling_rules.SAMPLING,
}

COMPLETION_HONOURED = {
    "max_tokens": whole(0, INT32),
    "echo": flag,
    "best_of": whole(1, MAX_CHOICES),
    **sampling_rules.COMPLETION,
}
CHAT_HONOURED = {"max_completion_tokens": whole(1, INT32), **sampling_rules.CHAT}


def judge_fields(path: str, body: dict[str, Any]) -> Findings:
    """Every field by itself and with its neighbours; not yet whether prompt and answer fit."""
    found = Findings()
    is_chat = path == CHAT
    honoured = HONOURED | (CHAT_HONOURED if is_chat else COMPLETION_HONOURED)
    no_ops = NO_OPS | (CHAT_NO_OPS if is_chat else COMPLETION_NO_OPS)
    for name, value in body.items():
        if name in honoured:
            if value is not None:
                honoured[name](found, name, value)
        elif name in no_ops:
            if not _is_no_op(value, no_ops[name]):
                found.wrong(name, *UNSERVED, *MALFORMED)
        elif is_chat and name in CHAT_TEMPLATE_FIELDS and not _is_no_op(value, CHAT_TEMPLATE_FIELDS[name]):
            for blamed in (name, "tool_choice", "messages", "continue_final_message"):
                found.open(blamed, *ANY_FAULT)
            found.open("messages", "context_length_exceeded")
    _model(found, body)
    (_messages if is_chat else _prompt)(found, body)
    _together(found, body, is_chat)
    sampling_rules.judge_together(found, body, is_chat)
    return found


def changes_template(body: dict[str, Any]) -> bool:
    """Whether the prompt of a chat is more than its messages in order."""
    fields = any(not _is_no_op(body[name], good) for name, good in CHAT_TEMPLATE_FIELDS.items() if name in body)
    own = set(MESSAGE_FIELDS) - {"role", "content", "name"}
    return fields or any(message.keys() & own or message["role"] == "tool" for message in body["messages"])


def _is_no_op(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(value == item and (is_number(value) == is_number(item)) for item in allowed)


def _model(found: Findings, body: dict[str, Any]) -> None:
    model = body.get("model", MODEL)
    if isinstance(model, str):
        if model != MODEL:
            found.wrong("model", "model_not_found", status=404)
        if LONE.search(model):
            found.open("model")
    elif model is None:
        found.open("model")
    else:
        found.wrong("model")


def _prompt(found: Findings, body: dict[str, Any]) -> None:
    if body.get("prompt") is None:
        found.wrong("prompt", "missing_required_parameter", *MALFORMED)
        return
    prompts = as_prompts(body["prompt"])
    if prompts is None or not prompts or not all(prompts):
        found.wrong("prompt", "missing_required_parameter", *MALFORMED)
    elif any(isinstance(prompt, str) and LONE.search(prompt) for prompt in prompts):
        found.wrong("prompt")


def as_prompts(value: Any) -> list[str] | list[list[int]] | None:
    """The prompts of a completion, None where it is none of the four kinds."""
    if isinstance(value, str) or is_ids(value):
        return [value]
    if isinstance(value, list) and (all(isinstance(item, str) for item in value) or all(map(is_ids, value))):
        return value
    return None


def is_ids(value: Any) -> bool:
    """A list of integers, at least one."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _messages(found: Findings, body: dict[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        found.wrong("messages", "missing_required_parameter", *MALFORMED)
        return
    for message in messages:
        if not isinstance(message, dict):
            found.wrong("messages")
            continue
        for name, value in message.items():
            if name in MESSAGE_UNSERVED:
                found.open("messages", *ANY_FAULT)
                found.must_fail |= value not in (None, [], "")
            elif name in MESSAGE_FIELDS and name not in ("role", "content", "name"):
                found.open("messages", *ANY_FAULT)
        if message.get("role") not in ("system", "developer", "user", "assistant", "tool"):
            found.wrong("messages", *ANY_FAULT)
        name = message.get("name")
        if name is not None and (not isinstance(name, str) or LONE.search(name)):
            found.wrong("messages")
        _content(found, message)


def _content(found: Findings, message: dict[str, Any]) -> None:
    content = message.get("content")
    if content in ("", []) or (content is None and message.get("role") == "assistant"):
        found.open("messages", *ANY_FAULT)
    elif isinstance(content, str):
        if LONE.search(content):
            found.wrong("messages")
    elif isinstance(content, list):
        for part in content:
            is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            if not is_text or LONE.search(part["text"]):
                found.wrong("messages", *ANY_FAULT)
    else:
        found.wrong("messages", *ANY_FAULT)


def _together(found: Findings, body: dict[str, Any], is_chat: bool) -> None:
    options = body.get("stream_options")
    if options is not None and body.get("stream") is not True:
        found.open("stream_options")
        found.must_fail |= isinstance(options, dict) and any(options.values())
    if "prefix" in HONOURED and None not in (body.get("prefix"), body.get("truncate_prompt_tokens")):
        found.wrong("truncate_prompt_tokens")
    if body.get("truncate_prompt_tokens") == 0:  # nothing is left
        found.wrong("messages" if is_chat else "prompt")
    n, best_of = body.get("n"), body.get("best_of")
    if is_chat:
        old, new = body.get("max_tokens"), body.get("max_completion_tokens")
        if None not in (old, new):
            for name in ("max_tokens", "max_completion_tokens"):
                found.open(name)
            found.must_fail |= old != new
        return
    if is_number(body.get("max_tokens")) and body["max_tokens"] == 0 and body.get("echo") is not True:
        found.wrong("max_tokens")
    if best_of is not None and best_of != (1 if n is None else n):
        found.wrong("best_of", *UNSERVED, *MALFORMED)
    prompts = as_prompts(body.get("prompt")) or []
    if (is_number(n) and len(prompts) * n > MAX_CHOICES) or len(prompts) > MAX_CHOICES:
        found.wrong("prompt")
        found.open("n")
