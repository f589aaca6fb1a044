"""Messages of a chat request, and what a chat template reads of them."""

import json
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from wingbeat.deployments.api.bodies.content_parts import ImagePart, TextPart, flat_parts
from wingbeat.deployments.api.bodies.ignored_fields import Part, ignored_fields
from wingbeat.deployments.api.bodies.tool_requests import ToolCall
from wingbeat.deployments.api.bodies.unserved_fields import MESSAGE, check_unserved
from wingbeat.deployments.api.errors import ApiError, invalid, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
_OWN_FIELDS = {"tool_calls": "assistant", "reasoning": "assistant", "reasoning_content": "assistant"}
_OWN_FIELDS["tool_call_id"] = "tool"


class ChatMessage(Part):
    """One message; its content is text, and images between it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    """Its text; that of all parts where there are images."""
    parts: SkipJsonSchema[list[TextPart | ImagePart] | None] = None
    """Of a content with images; no field of a request."""
    name: str | None = None
    """Handed to the chat template, which decides what to do with it."""
    tool_calls: list[ToolCall] | None = Field(None, min_length=1)
    """What an assistant's message called."""
    tool_call_id: str | None = None
    """The call that a tool's message answers."""
    reasoning: str | None = None
    """An assistant's thoughts, as answers of this server carry them."""
    reasoning_content: str | None = None
    """Another name of it."""

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        for name, role in _OWN_FIELDS.items():
            if getattr(self, name) is not None and self.role != role:
                raise ValueError(f"'{name}' belongs to messages of role '{role}'")
        if self.images and self.role != "user":
            raise invalid(self.images[0].path, "is not in a message of role 'user', which alone may have images")
        return self

    @property
    def images(self) -> list[ImagePart]:
        """Among its parts."""
        return [part for part in self.parts or () if part.type == "image"]

    def as_template_input(self, in_parts: bool = False) -> dict[str, Any]:
        """The fields a chat template reads; arguments of calls are objects, as transformers' templates expect.

        Args:
            in_parts: text is a list of one part, as templates of models with images read it.
        """
        fields = self.model_dump(exclude_none=True, exclude={"tool_calls", "reasoning", "reasoning_content", "parts"})
        if self.parts is not None:
            fields["content"] = [_part_as_template_input(part) for part in self.parts]
        elif in_parts and self.content:
            fields["content"] = [{"type": "text", "text": self.content}]
        if self.tool_calls is not None:
            fields["tool_calls"] = [_call_as_template_input(call) for call in self.tool_calls]
        thoughts = self.reasoning_content or self.reasoning
        if thoughts is not None:
            fields["reasoning_content"] = fields["reasoning"] = thoughts
        return fields


def flat_messages(value: Any) -> Any:
    """The messages with their content as text, or as parts where there are images, without fields that ask for nothing.

    Raises:
        ApiError: 400 naming the part that is malformed or not served.
    """
    if not isinstance(value, list):
        raise invalid("messages", "must be a list of messages")
    return [_flat_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _flat_message(message: Any, path: str) -> dict[str, Any]:
    """A message with its content read and without fields that ask for nothing."""
    if not isinstance(message, dict):
        raise invalid(path, "must be an object with 'role' and 'content'")
    role = message.get("role")
    if role == "function":
        raise ApiError(f"Messages of role '{role}' are not supported.", param=f"{path}.role", code="unsupported_value")
    if isinstance(role, str) and role not in ROLES:
        raise invalid(f"{path}.role", f"is '{shown(role)}', must be one of {', '.join(ROLES)}")
    check_unserved(message, MESSAGE, path)
    fields = {name: message[name] for name in message if name not in MESSAGE}
    if "parts" in fields:
        ignored_fields().pass_over("parts", fields.pop("parts"), path)
    if fields.get("tool_calls") == []:
        del fields["tool_calls"]
    if isinstance(fields.get("content"), list):
        fields |= flat_parts(fields["content"], f"{path}.content")
    if fields.get("content") is None and (role == "assistant" or fields.get("tool_calls")):
        # It called something, thought, or was interrupted.
        fields["content"] = ""
    _check_calls(fields.get("tool_calls"), path)
    return fields


def _check_calls(calls: Any, path: str) -> None:
    """Arguments must be an object in JSON: templates write them in their own form."""
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str) and arguments and not isinstance(_object(arguments), dict):
            raise invalid(f"{path}.tool_calls[{index}].function.arguments", "must be an object in JSON")


def _object(text: str) -> Any:
    """The JSON value; None where it is none, or none that a template could write."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _part_as_template_input(part: TextPart | ImagePart) -> dict[str, Any]:
    return {"type": "image"} if part.type == "image" else {"type": "text", "text": part.text}


def _call_as_template_input(call: ToolCall) -> dict[str, Any]:
    fields = call.model_dump(exclude_none=True, exclude={"index"})
    fields["function"]["arguments"] = json.loads(call.function.arguments)
    return fields
