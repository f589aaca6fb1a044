"""Request body of `/v1/chat/completions`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import FailFast, Field, field_validator, model_validator

from wingbeat.deployments.api.bodies.chat_messages import ChatMessage, flat_messages
from wingbeat.deployments.api.bodies.content_parts import ImagePart
from wingbeat.deployments.api.bodies.requests import GenerationBody
from wingbeat.deployments.api.bodies.tool_requests import (
    MAX_TOOLS,
    HostedTool,
    NamedTool,
    Tool,
    check_choice,
    read_choice,
    read_tools,
)
from wingbeat.deployments.api.bodies.unserved_fields import CHAT, Unserved
from wingbeat.deployments.api.errors import invalid, shown
from wingbeat.runtime.scheduling.request import INT32_MAX, MAX_LOGPROBS

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
NOT_VARIABLES = frozenset(
    (
        *("conversation", "messages", "chat_template", "tokenize", "sanitize_control_tokens", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("tools", "documents", "add_generation_prompt", "continue_final_message"),
    )
)
"""What `chat_template_kwargs` may not set: a request has fields of its own for them, or they are the server's."""


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    unserved: ClassVar[Mapping[str, Unserved]] = CHAT
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
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables that the chat template reads."""
    reasoning_effort: Effort | None = None
    """Handed to the chat template, none also as `enable_thinking: false`."""
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
    def images(self) -> list[ImagePart]:
        """Of all messages."""
        return [image for message in self.messages for image in message.images]

    def template_messages(self, in_parts: bool = False) -> list[dict[str, Any]]:
        """The messages as a chat template reads them; `in_parts` as for `ChatMessage.as_template_input`."""
        return [message.as_template_input(in_parts) for message in self.messages]

    def template_variables(self) -> dict[str, Any]:
        """What else it reads."""
        variables: dict[str, Any] = dict(self.chat_template_kwargs or {})
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
