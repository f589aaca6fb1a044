"""Translates input items of the Responses API to messages of a chat."""

from collections.abc import Iterable
from typing import Any

from wingbeat.deployments.api.bodies.content_parts import OtherPart, TextPart, part_readers, string_of
from wingbeat.deployments.api.bodies.unserved_fields import ignored_fields
from wingbeat.deployments.api.errors import ApiError, invalid, shown

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ROLES = ("system", "developer", "user", "assistant")
_ITEMS = {
    "message": frozenset(("type", "role", "content", "phase")),
    "function_call": frozenset(("type", "call_id", "name", "arguments")),
    "function_call_output": frozenset(("type", "call_id", "output")),
    "reasoning": frozenset(("type", "content", "summary", "encrypted_content")),
}
"""Known fields of an item, by the item's type. Encrypted content is ignored, because this server neither writes nor
reads it.
"""
_PART = frozenset(("type", "text", "logprobs"))


def chat_messages(instructions: str | None, items: str | list[Any]) -> list[dict[str, Any]]:
    """Returns the messages in the form of a chat request.

    Raises:
        ApiError: 400, naming the item that is malformed or not supported.
    """
    conversation = _Conversation()
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index}]")
    return conversation.messages


class _Conversation:
    """Messages of the chat so far. Successive items with reasoning, text and calls form one assistant message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._thoughts: list[str] = []

    def add(self, item: Any, path: str) -> None:
        if not isinstance(item, dict):
            raise invalid(path, "must be an object")
        kind = item.get("type", "message")
        if isinstance(kind, str) and kind in _ITEMS:
            ignored_fields().pass_over_unknown(item, _ITEMS[kind], path)
        match kind:
            case "message":
                self._add_message(item, path)
            case "function_call":
                self._add_call(item, path)
            case "function_call_output":
                call_id = string_of(item, "call_id", path)
                content = _text(item.get("output"), f"{path}.output")
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case "reasoning":
                parts = item.get("content") or item.get("summary") or []
                self._thoughts.append(_text(parts, f"{path}.content"))
            case _:
                message = f"Items of type {shown(str(kind))!r} are not supported."
                raise ApiError(message, param=f"{path}.type", code="unsupported_value")

    def _add_message(self, item: dict[str, Any], path: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise invalid(f"{path}.role", f"must be one of {', '.join(ROLES)}")
        given, where = item.get("content"), f"{path}.content"
        if role == "assistant":
            message = self._open_answer()
            message["content"] = message["content"] + _text(given, where)
        else:
            content = _parts(given, where) if role == "user" and _has_others(given) else _text(given, where)
            self.messages.append({"role": role, "content": content})

    def _add_call(self, item: dict[str, Any], path: str) -> None:
        function = {"name": string_of(item, "name", path), "arguments": item.get("arguments")}
        call = {"id": string_of(item, "call_id", path), "type": "function", "function": function}
        self._open_answer().setdefault("tool_calls", []).append(call)

    def _open_answer(self) -> dict[str, Any]:
        """Returns the assistant's message to which text and calls are added; begins a message if necessary."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        message = self.messages[-1]
        if self._thoughts:
            message["reasoning"] = "\n".join(self._thoughts)
            self._thoughts = []
        return message


def _text(content: Any, path: str) -> str:
    """Returns the text of a string or of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(path, "must be a string or a list of parts")
    return "\n".join(_part_texts(content, path))


def _has_others(content: Any) -> bool:
    return isinstance(content, list) and any(_kind(part) in part_readers("responses") for part in content)


def _parts(parts: list[Any], path: str) -> list[TextPart | OtherPart]:
    """Returns the parsed parts; each holds its path in the request's `input`."""
    read: list[TextPart | OtherPart] = []
    for index, part in enumerate(parts):
        where = f"{path}[{index}]"
        if (reader := part_readers("responses").get(_kind(part))) is not None:
            read.append(reader(part, where))
        else:
            read.append(TextPart(type="text", text=_part_text(part, where)))
    return read


def _kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else str(kind)


def _part_texts(parts: list[Any], path: str) -> Iterable[str]:
    for index, part in enumerate(parts):
        yield _part_text(part, f"{path}[{index}]")


def _part_text(part: Any, path: str) -> str:
    kind = _kind(part)
    if kind not in TEXT_PARTS:
        served = "only text is" if kind not in part_readers("responses") else "only users' messages may have them"
        message = f"Content parts of type {shown(kind)!r} are not supported; {served}."
        raise ApiError(message, param=f"{path}.type", code="unsupported_value")
    ignored_fields().pass_over_unknown(part, _PART, path)
    return string_of(part, "text", path)
