"""Request body of `/v1/chat/completions`: its messages, what a chat template reads of them, and its fields."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import FailFast, Field, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from wingbeat.deployments.api.bodies.content_parts import OtherPart, TextPart, flat_parts
from wingbeat.deployments.api.bodies.foreign_fields import FOREIGN
from wingbeat.deployments.api.bodies.requests import GenerationBody
from wingbeat.deployments.api.bodies.tool_requests import (
    MAX_TOOLS,
    HostedTool,
    NamedTool,
    Tool,
    ToolCall,
    check_choice,
    read_choice,
    read_tools,
)
from wingbeat.deployments.api.bodies.unserved_fields import (
    CHAT,
    MESSAGE,
    Part,
    Unserved,
    check_unserved,
    ignored_fields,
)
from wingbeat.deployments.api.errors import ApiError, invalid, shown, unsupported
from wingbeat.runtime.scheduling.request import INT32_MAX, MAX_LOGPROBS

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TEMPLATE_CHARS = 2**16
_OWN_FIELDS = {"tool_calls": "assistant", "reasoning": "assistant", "reasoning_content": "assistant"}
_OWN_FIELDS["tool_call_id"] = "tool"


class ChatMessage(Part):
    """One message; its content is text, and other parts between it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    """Its text; that of all parts where some are no text."""
    parts: SkipJsonSchema[list[TextPart | OtherPart] | None] = None
    """Parts of a content that is not text alone; no field of a request."""
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
        if (others := self.other_parts) and self.role != "user":
            problem = f"is not in a message of role 'user', which alone may have {others[0].type}"
            raise invalid(others[0].path, problem)
        return self

    @property
    def other_parts(self) -> list[OtherPart]:
        """Parts of its content that are no text."""
        return [part for part in self.parts or () if isinstance(part, OtherPart)]

    def as_template_input(self, in_parts: bool = False, objects_alone: bool = False) -> dict[str, Any]:
        """The fields a chat template reads; arguments of calls are objects, as transformers' templates expect.

        Args:
            in_parts: text is a list of one part, as templates of models that take other parts read it.
            objects_alone: arguments that are no object in JSON become an empty one; otherwise they are their text.
        """
        fields = self.model_dump(exclude_none=True, exclude={"tool_calls", "reasoning", "reasoning_content", "parts"})
        if self.parts is not None:
            fields["content"] = [part.as_template_input() for part in self.parts]
        elif in_parts and self.content:
            fields["content"] = [{"type": "text", "text": self.content}]
        if self.tool_calls is not None:
            fields["tool_calls"] = [_call_as_template_input(call, objects_alone) for call in self.tool_calls]
        thoughts = self.reasoning_content or self.reasoning
        if thoughts is not None:
            fields["reasoning_content"] = fields["reasoning"] = thoughts
        return fields


def flat_messages(value: Any) -> Any:
    """The messages with their content as text, or as parts where some are no text, without fields that ask for nothing.

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
    return fields


def _arguments(text: str) -> dict[str, Any] | str:
    """The arguments of a call as an object; the text where it is no object in JSON, as of a call that was cut."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return {} if value is None else value if isinstance(value, dict) else text


def _call_as_template_input(call: ToolCall, objects_alone: bool) -> dict[str, Any]:
    fields = call.model_dump(exclude_none=True, exclude={"index"})
    arguments = _arguments(call.function.arguments)
    fields["function"]["arguments"] = {} if objects_alone and isinstance(arguments, str) else arguments
    return fields


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
NOT_VARIABLES = frozenset(
    (
        *("conversation", "messages", "chat_template", "tokenize", "sanitize_control_tokens", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("tools", "documents", "add_generation_prompt", "continue_final_message"),
    )
)
"""What `chat_template_kwargs` may not set: a request has fields of its own for them, or they are the server's."""


class Thinking(Part):
    """Whether to think; how long is the model's choice."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Any = None


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    unserved: ClassVar[Mapping[str, Unserved]] = {**FOREIGN, **CHAT}
    prompt_field: ClassVar[str] = "messages"
    logprobs_field: ClassVar[str] = "top_logprobs"

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)

    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Most likely tokens to report beside each token; needs `logprobs`."""

    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = Field(None, json_schema_extra={"anyOf": [{"type": "string"}, {"type": "object"}]})
    """none, auto, required, or a `NamedTool`; auto where there are tools."""
    parallel_tool_calls: bool | None = None
    """False keeps the first call of an answer alone."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The answer goes on in the last message, which is left open."""
    chat_template: str | None = None
    """In the place of the server's, where it lets requests have one."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables that the chat template reads."""
    reasoning_effort: Effort | None = None
    """Handed to the chat template, none also as `enable_thinking: false`."""
    thinking: Thinking | None = None
    """Handed to the chat template as `enable_thinking`."""
    documents: list[dict[str, Any]] | None = None
    """Handed to the chat template."""
    include_reasoning: bool | None = None
    """False leaves thoughts out of the answer; they are written all the same."""

    @field_validator("messages", mode="before")
    @classmethod
    def _check_messages(cls, value: Any) -> Any:
        return flat_messages(value)

    @field_validator("tools", mode="before")
    @classmethod
    def _read_tools(cls, value: Any) -> Any:
        tools = [] if value is None else read_tools(value, Tool, ("function",))
        for tool in tools:
            if isinstance(tool, HostedTool):
                tool.pass_over()
        return None if value is None else [tool for tool in tools if isinstance(tool, Tool)]

    @field_validator("tool_choice")
    @classmethod
    def _read_choice(cls, value: Any) -> Any:
        return value if value is None else read_choice(value)

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
                raise invalid("chat_template_kwargs", f"sets '{shown(name)}', which is no variable of a template")
        return value

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens", "contradicts 'max_completion_tokens'; give one of them")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        check_choice(self.tool_choice, self.tools or [])
        return self

    @model_validator(mode="after")
    def _check_continuation(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("continue_final_message", "contradicts 'add_generation_prompt'; set one of them")
        if self.continue_final_message and self.messages[-1].tool_calls:
            raise invalid("continue_final_message", "needs a last message that is text")
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
        """The limit the caller gave, under its new or its old name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_field(self) -> str:
        """The name it was given under."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def calls(self) -> str | NamedTool:
        """Which calls the answer may or must have."""
        if self.tool_choice is None or not self.tools:
            return "auto" if self.tools else "none"
        return self.tool_choice

    @property
    def other_parts(self) -> list[OtherPart]:
        """Parts of all messages that are no text."""
        return [part for message in self.messages for part in message.other_parts]

    def template_messages(self, in_parts: bool = False, objects_alone: bool = False) -> list[dict[str, Any]]:
        """The messages as a chat template reads them; arguments as for `ChatMessage.as_template_input`."""
        return [message.as_template_input(in_parts, objects_alone) for message in self.messages]

    def template_variables(self) -> dict[str, Any]:
        """What else it reads."""
        variables: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            variables.setdefault("enable_thinking", self.thinking.type != "disabled")
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
            if self.reasoning_effort == "none":
                variables.setdefault("enable_thinking", False)
        if self.tools:
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        if self.documents:
            variables["documents"] = self.documents
        variables["continue_final_message"] = bool(self.continue_final_message)
        asks_for_none = self.add_generation_prompt is False or self.continue_final_message
        variables["add_generation_prompt"] = not asks_for_none
        return variables
