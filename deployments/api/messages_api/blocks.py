"""Translates Anthropic's messages, which consist of content blocks, to messages of a chat."""

import re
from typing import Any

from wingbeat.deployments.api.bodies.content_parts import OtherPart, TextPart, part_readers, string_of
from wingbeat.deployments.api.bodies.unserved_fields import ignored_fields
from wingbeat.deployments.api.errors import ApiError, invalid, shown

_MESSAGE = frozenset(("role", "content"))
_BILLING = re.compile(r"(?:x-anthropic-billing-header:[^\n]*(?:\n|$))+", re.IGNORECASE)
"""Billing lines that Claude Code writes before its system prompt. The lines are removed because they mean nothing to a
model, and because they differ between requests: the prefix cache would be useless, since no prompt would begin with the
prompt of the previous turn.
"""
_BLOCKS = {
    "text": frozenset(("type", "text")),
    "thinking": frozenset(("type", "thinking", "signature")),
    "redacted_thinking": frozenset(("type", "data")),
    "tool_use": frozenset(("type", "id", "name", "input", "caller")),
    "tool_result": frozenset(("type", "tool_use_id", "content", "is_error")),
}
"""Known fields of a block, by the block's type. `is_error` is known but is not passed on, because no chat template
reads this field, and the block's text describes the error anyway.
"""


def chat_messages(system: str | list[Any] | None, messages: list[Any]) -> list[dict[str, Any]]:
    """Returns the messages in the form of a chat request.

    Raises:
        ApiError: 400, naming the block that is malformed or not supported.
    """
    converted = _system_messages(system or "", "system")
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not isinstance(message, dict):
            raise invalid(path, "must be an object with 'role' and 'content'")
        ignored_fields().pass_over_unknown(message, _MESSAGE, path)
        match message.get("role"):
            case "user":
                converted += _user_messages(message.get("content"), f"{path}.content")
            case "assistant":
                converted.append(_assistant_message(message.get("content"), f"{path}.content"))
            case "system":
                converted += _system_messages(message.get("content"), f"{path}.content")
            case _:
                raise invalid(f"{path}.role", "must be 'user', 'assistant' or 'system'")
    return converted


def _system_messages(content: Any, path: str) -> list[dict[str, Any]]:
    """Returns a list with the system message, from which billing lines are removed; an empty list if no text is
    left.
    """
    texts = (_BILLING.sub("", text, count=1) if _BILLING.match(text) else text for text in _texts(content, path))
    text = "\n".join(filter(None, texts))
    return [{"role": "system", "content": text}] if text else []


def _user_messages(content: Any, path: str) -> list[dict[str, Any]]:
    """Returns the messages for a user's message: one for each tool result, then the user message itself."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[dict[str, Any]] = []
    readers, parts = part_readers("messages"), list[TextPart | OtherPart]()
    for block, where in _blocks(content, path):
        match block.get("type"):
            case "text":
                parts.append(TextPart(type="text", text=string_of(block, "text", where)))
            case "tool_result":
                text = _text(block.get("content") or "", f"{where}.content")
                call_id = string_of(block, "tool_use_id", where)
                results.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case str(kind) if kind in readers:
                parts.append(readers[kind](block, where))
            case kind:
                raise _unsupported(kind, where)
    return [*results, {"role": "user", "content": parts or ""}] if parts or not results else results


def _assistant_message(content: Any, path: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for block, where in _blocks(content, path):
        match block.get("type"):
            case "text":
                texts.append(string_of(block, "text", where))
            case "thinking":
                thoughts.append(string_of(block, "thinking", where))
            case "redacted_thinking":
                continue
            case "tool_use":
                function = {"name": string_of(block, "name", where), "arguments": block.get("input")}
                calls.append({"id": string_of(block, "id", where), "type": "function", "function": function})
            case kind:
                raise _unsupported(kind, where)
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(content: Any, path: str) -> list[tuple[dict[str, Any], str]]:
    """Returns the blocks, each with its path."""
    if not isinstance(content, list):
        raise invalid(path, "must be a string or a list of blocks")
    blocks = [(block, f"{path}[{index}]") for index, block in enumerate(content)]
    for block, where in blocks:
        if not isinstance(block, dict):
            raise invalid(where, "must be an object")
        known = _BLOCKS.get(block["type"]) if isinstance(block.get("type"), str) else None
        if known is not None:
            ignored_fields().pass_over_unknown(block, known, where)
    return blocks


def _text(content: Any, path: str) -> str:
    """Returns the text of a string or of text blocks."""
    return "\n".join(_texts(content, path))


def _texts(content: Any, path: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for block, where in _blocks(content, path):
        if block.get("type") != "text":
            raise _unsupported(block.get("type"), where)
        texts.append(string_of(block, "text", where))
    return texts


def _unsupported(kind: Any, path: str) -> ApiError:
    message = f"Content blocks of type {shown(str(kind))!r} are not supported here."
    return ApiError(message, param=f"{path}.type", code="unsupported_value")
