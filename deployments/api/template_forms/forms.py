"""Alternative forms of a conversation, for a chat template that refuses the messages as sent."""

from collections.abc import Iterator
from typing import Any

from wingbeat.deployments.api.bodies.chat_requests import ChatBody

SYSTEM = ("system", "developer")
Message = dict[str, Any]


def other_forms(body: ChatBody, in_parts: bool) -> Iterator[list[Message]]:
    """Yields forms of the messages for stricter templates; the caller uses the first form that the template accepts.

    Some templates refuse certain fields of content parts, and some refuse a system message after other messages.

    Args:
        in_parts: as for `ChatMessage.as_template_input`.
    """
    stricter = body.template_messages(in_parts, is_strict=True)
    if stricter != body.template_messages(in_parts):
        yield stricter
    system_first = with_system_first(stricter)
    if system_first != stricter:
        yield system_first


def with_system_first(messages: list[Message]) -> list[Message]:
    """Joins the system messages at the start into one message, and turns each later system message into a user message.

    No message changes its position. Each prompt therefore still begins with the prompt of the previous turn, so that
    the prefix cache can be used.
    """
    found: list[Message] = []
    was_system = False
    for message in messages:
        is_system, last = message["role"] in SYSTEM, found[-1] if found else None
        role = message["role"]
        if is_system:
            role = "system" if last is None or last["role"] in SYSTEM else "user"
        if last is not None and last["role"] == role != "assistant" and (is_system or was_system):
            found[-1] = {**last, "content": _joined(last["content"], message["content"])}
        else:
            found.append({**message, "role": role})
        was_system = is_system
    return found


def _joined(first: str | list[Any], second: str | list[Any]) -> str | list[Any]:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
