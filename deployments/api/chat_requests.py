"""Request body of `/v1/chat/completions`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator, model_validator

from wingbeat.deployments.api.errors import ApiError, shown
from wingbeat.deployments.api.requests import GenerationBody, invalid, unknown_parameter, unsupported
from wingbeat.deployments.api.unserved_fields import CHAT, MESSAGE, IsOff
from wingbeat.runtime.scheduling.request import INT32_MAX

ROLES = ("system", "developer", "user", "assistant")


class ChatMessage(BaseModel):
    """One message; its content is text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None
    """Handed to the chat template, which decides what to do with it."""

    def as_template_input(self) -> dict[str, str]:
        """The fields a chat template reads."""
        return self.model_dump(exclude_none=True)


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    unserved: ClassVar[Mapping[str, IsOff]] = CHAT
    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)

    @field_validator("messages", mode="before")
    @classmethod
    def _check_messages(cls, value: Any) -> Any:
        if not isinstance(value, list):
            raise invalid("messages", "must be a list of messages")
        return [_flat_message(message, f"messages[{index}]") for index, message in enumerate(value)]

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens", "contradicts 'max_completion_tokens'; give one of them")
        return self

    @property
    def asked_max_tokens(self) -> int | None:
        """The limit the caller gave, under its new or its old name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_field(self) -> str:
        """The name it was given under."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


def _flat_message(message: Any, path: str) -> dict[str, Any]:
    """A message with its text parts joined by newlines and without fields that ask for nothing."""
    if not isinstance(message, dict):
        raise invalid(path, "must be an object with 'role' and 'content'")
    role = message.get("role")
    if role in ("tool", "function"):
        raise ApiError(f"Messages of role '{role}' are not supported.", param=f"{path}.role", code="unsupported_value")
    if isinstance(role, str) and role not in ROLES:
        raise invalid(f"{path}.role", f"is '{shown(role)}', must be one of {', '.join(ROLES)}")
    for name, is_off in MESSAGE.items():
        if name in message and not is_off(message[name]):
            raise unsupported(f"{path}.{name}")
    fields = {name: message[name] for name in message if name not in MESSAGE}
    if isinstance(fields.get("content"), list):
        parts = [_part_text(part, f"{path}.content[{index}]") for index, part in enumerate(fields["content"])]
        fields["content"] = "\n".join(parts)
    return fields


def _part_text(part: Any, path: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid(path, "must be an object with a 'type'")
    if part["type"] != "text":
        message = f"Content parts of type '{shown(part['type'])}' are not supported; only 'text' is."
        raise ApiError(message, param=f"{path}.type", code="unsupported_value")
    unknown = sorted(part.keys() - {"type", "text"})
    if unknown:
        raise unknown_parameter(f"{path}.{unknown[0]}")
    if not isinstance(part.get("text"), str):
        raise invalid(f"{path}.text", "must be a string")
    return part["text"]
