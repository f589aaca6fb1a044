"""Request body of `/v1/chat/completions`: its messages, its fields, and the variables of the chat template."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import FailFast, Field, create_model, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from wingbeat.deployments.api.bodies.chat_fields import ChatFields, MessageFields
from wingbeat.deployments.api.bodies.content_parts import OtherPart, TextPart, flat_parts
from wingbeat.deployments.api.bodies.request_body import RequestBody
from wingbeat.deployments.api.bodies.unserved_fields import (
    CHAT,
    MESSAGE,
    Part,
    Unserved,
    check_unserved,
    ignored_fields,
    of_parts,
)
from wingbeat.deployments.api.errors import ApiError, invalid, shown, unsupported
from wingbeat.deployments.parts import hooks
from wingbeat.runtime.scheduling.request import INT32_MAX, MAX_LOGPROBS

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TEMPLATE_CHARS = 2**16

MoreMessageFields = create_model("MoreMessageFields", __base__=(*hooks("message_fields"), MessageFields))
"""Fields of a message, including fields that optional parts of the application add."""
MoreChatFields = create_model("MoreChatFields", __base__=(*(fields() for fields in hooks("chat_fields")), ChatFields))
"""Fields of a request, including fields that optional parts of the application add."""


class ChatMessage(MoreMessageFields):
    """Message of a chat: a text, or a sequence of text parts and media parts."""

    parts: SkipJsonSchema[list[TextPart | OtherPart] | None] = None
    """All content parts, if at least one of them is not text. The field is set by `flat_messages`; clients cannot set
    it.
    """
    name: str | None = None
    """Name of the author, passed to the chat template."""

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if (others := self.other_parts) and self.role != "user":
            problem = f"is not in a message of role 'user': only such a message may have {others[0].type}"
            raise invalid(others[0].path, problem)
        return self

    @property
    def other_parts(self) -> list[OtherPart]:
        """Content parts other than text."""
        return [part for part in self.parts or () if isinstance(part, OtherPart)]

    def as_template_input(self, in_parts: bool = False, is_strict: bool = False) -> dict[str, Any]:
        """Returns the message's fields for a chat template.

        Args:
            in_parts: whether a plain text is passed as a list with one text part, as templates of multimodal models
                expect.
            is_strict: see `MessageFields.template_fields`.
        """
        fields = self.model_dump(exclude_none=True, include={"role", "content", "name"})
        if self.parts is not None:
            fields["content"] = [part.as_template_input() for part in self.parts]
        elif in_parts and self.content:
            fields["content"] = [{"type": "text", "text": self.content}]
        return fields | self.template_fields(is_strict)


def flat_messages(value: Any) -> Any:
    """Converts a request's messages: `content` becomes a text, and `parts` is added if some parts are not text.

    Fields that cannot have an effect are dropped.

    Raises:
        ApiError: 400, naming the part that is malformed or not supported.
    """
    if not isinstance(value, list):
        raise invalid("messages", "must be a list of messages")
    return [_flat_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _flat_message(message: Any, path: str) -> dict[str, Any]:
    """Converts one message as `flat_messages` describes."""
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
    if isinstance(fields.get("content"), list):
        fields |= flat_parts(fields["content"], f"{path}.content")
    if fields.get("content") is None and role == "assistant":
        # `content` may be absent here: the assistant called a tool, wrote only reasoning, or was interrupted.
        fields["content"] = ""
    return fields


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
NOT_VARIABLES = frozenset(
    (
        *("conversation", "messages", "chat_template", "tokenize", "sanitize_control_tokens", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("tools", "documents", "add_generation_prompt", "continue_final_message"),
    )
)
"""Names that `chat_template_kwargs` may not set, because a request field or the server sets them."""


class Thinking(Part):
    """Whether the model writes reasoning; `budget_tokens` is ignored, because the model decides how long it reasons."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Any = None


class ChatBody(MoreChatFields):
    """`POST /v1/chat/completions`."""

    unserved: ClassVar[Mapping[str, Unserved]] = {**of_parts("/v1/chat/completions"), **CHAT}
    prompt_field: ClassVar[str] = "messages"
    logprobs_field: ClassVar[str] = "top_logprobs"

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)

    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Number of most likely tokens to report for each token; allowed only with `logprobs`."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Whether the answer continues the last message instead of starting a new one."""
    chat_template: str | None = None
    """Chat template to use instead of the model's; allowed only if the setting `chat_template` is `request`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    reasoning_effort: Effort | None = None
    """Passed to the chat template. The value "none" also sets the variable `enable_thinking` to false."""
    thinking: Thinking | None = None
    """Passed to the chat template as `enable_thinking`."""
    documents: list[dict[str, Any]] | None = None
    """Passed to the chat template."""

    @field_validator("messages", mode="before")
    @classmethod
    def _check_messages(cls, value: Any) -> Any:
        return flat_messages(value)

    @field_validator("chat_template", mode="before")
    @classmethod
    def _check_template(cls, value: Any) -> Any:
        if value is not None and not (isinstance(value, str) and 0 < len(value) <= MAX_TEMPLATE_CHARS):
            raise unsupported("chat_template", f"a template is a text of 1 to {MAX_TEMPLATE_CHARS} characters")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_variables(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in value or ():
            if name in NOT_VARIABLES:
                raise invalid(
                    "chat_template_kwargs",
                    f"sets '{shown(name)}', which is not a template variable that requests may set",
                )
        return value

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens", "contradicts 'max_completion_tokens'; give one of them")
        return self

    @model_validator(mode="after")
    def _check_continuation(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("continue_final_message", "contradicts 'add_generation_prompt'; set one of them")
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs 'logprobs' to be true")
        return self

    @property
    def asked_logprobs(self) -> int | None:
        """See `SamplingFields`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def asked_max_tokens(self) -> int | None:
        """The caller's limit of generated tokens: `max_completion_tokens` if given, else `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_field(self) -> str:
        """Name of the field that `asked_max_tokens` comes from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def other_parts(self) -> list[OtherPart]:
        """Content parts other than text, of all messages."""
        return [part for message in self.messages for part in message.other_parts]

    def template_messages(self, in_parts: bool = False, is_strict: bool = False) -> list[dict[str, Any]]:
        """Returns the messages for a chat template; arguments as for `ChatMessage.as_template_input`."""
        return [message.as_template_input(in_parts, is_strict) for message in self.messages]

    def template_variables(self) -> dict[str, Any]:
        """Returns the variables of the chat template, except the messages."""
        variables: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            variables.setdefault("enable_thinking", self.thinking.type != "disabled")
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
            if self.reasoning_effort == "none":
                variables.setdefault("enable_thinking", False)
        for name in self.template_names:
            if listed := getattr(self, name):
                variables[name] = [one.model_dump(exclude_none=True) for one in listed]
        if self.documents:
            variables["documents"] = self.documents
        variables["continue_final_message"] = bool(self.continue_final_message)
        asks_for_none = self.add_generation_prompt is False or self.continue_final_message
        variables["add_generation_prompt"] = not asks_for_none
        return variables


def described(names: Iterable[str]) -> type[RequestBody]:
    """Makes a body class with the given fields of a chat request, all optional, for other endpoints that accept a
    conversation.
    """
    fields: dict[str, Any] = {
        name: (Annotated[ChatBody.model_fields[name].annotation | None, ChatBody.model_fields[name]], None)
        for name in names
    }
    return create_model("Described", __base__=RequestBody, **fields)
