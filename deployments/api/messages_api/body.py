"""Request bodies of `/v1/messages` and `/v1/messages/count_tokens`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator
from pydantic.json_schema import SkipJsonSchema

from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.request_body import RequestBody
from wingbeat.deployments.api.bodies.unserved_fields import COMMON, Part, Unserved, hint, of_parts, passed_over, refused
from wingbeat.deployments.api.errors import invalid
from wingbeat.deployments.api.messages_api.blocks import chat_messages
from wingbeat.deployments.api.parsed.shared_with_chat import SharedWithChat
from wingbeat.deployments.api.parsed.tools import HostedTool, read_tools
from wingbeat.runtime.scheduling.request import INT32_MAX

ANTHROPIC_PROMPT: Mapping[str, Unserved] = {
    "mcp_servers": passed_over("tools of other services are not run here", []),
    "context_management": passed_over("a prompt that is too long is refused, not shortened"),
    "container": passed_over("tools of other services are not run here"),
    "speed": hint("all requests are served alike"),
    "diagnostics": passed_over("the answer has 'metrics'"),
    "user_profile_id": hint("it identifies the caller"),
    "betas": hint("what is served is served without a beta's name"),
    "workspace_id": hint("it identifies the caller"),
}

ANTHROPIC_MESSAGE: Mapping[str, Unserved] = {
    **COMMON,
    **ANTHROPIC_PROMPT,
    "inference_geo": refused("where texts are computed is a promise that this server cannot give"),
}


NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
"""For error messages: maps the name of a chat completion's field to the name of the Messages API's field."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Maps Anthropic's values of `tool_choice` to OpenAI's values."""


class AnthropicTool(Part):
    """A tool: description, and a JSON schema of its input."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """Ignored: inputs are always streamed token by token."""
    input_examples: list[dict[str, Any]] | None = None
    """Ignored: no chat template reads examples."""
    defer_loading: bool | None = None
    """Ignored: all tools are shown to the model from the beginning."""
    allowed_callers: list[str] | None = None
    """Ignored: only the model calls tools here."""

    def as_chat(self) -> dict[str, Any]:
        """Returns the tool in the form of a chat request."""
        function = {"name": self.name, "parameters": self.input_schema}
        optional = {"description": self.description, "strict": self.strict}
        function |= {name: value for name, value in optional.items() if value is not None}
        return {"type": "function", "function": function}


class AnthropicChoice(Part):
    """Tools that the model may or must use."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def as_chat(self) -> str | dict[str, Any]:
        """Returns the choice in the form of a chat request."""
        if self.type != "tool":
            return CHOICES[self.type]
        if self.name is None:
            raise invalid("tool_choice.name", "is missing: name the tool")
        return {"type": "function", "function": {"name": self.name}}


class Thinking(Part):
    """Whether the model writes reasoning.

    `budget_tokens` is ignored, because the model decides how long it reasons, within `max_tokens`.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Part):
    """A JSON schema that the answer must match."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    """Effort and format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Passed to the chat template as `reasoning_effort`."""
    format: OutputFormat | None = None


class CountBody(RequestBody):
    """`POST /v1/messages/count_tokens`: the fields of `/v1/messages` that affect the prompt."""

    unserved: ClassVar[Mapping[str, Unserved]] = ANTHROPIC_PROMPT

    model: str | None = None
    messages: list[Any] = Field(min_length=1)
    """Messages of users, assistants and the system, with text, `tool_use`, `tool_result` and `thinking` blocks."""
    system: str | list[Any] | None = None
    tools: list[AnthropicTool | SkipJsonSchema[HostedTool]] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    """Passed to the chat template as `enable_thinking`."""
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Older name of `output_config.format`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension: further variables of the chat template."""

    @field_validator("tools", mode="before")
    @classmethod
    def _read_tools(cls, value: Any) -> Any:
        return None if value is None else read_tools(value, AnthropicTool, (None, "custom"))

    def as_chat(self) -> ChatBody:
        """Returns the request in the form of a chat request.

        Raises:
            ApiError: 400, a field is invalid. The error contains the name that the field has in a chat request; the
                caller translates this name by `NAMES`.
        """
        return ChatBody.of_fields({name: value for name, value in self._chat_fields().items() if value is not None})

    def _chat_fields(self) -> dict[str, Any]:
        messages = chat_messages(self.system, self.messages)
        # If the last message is from the assistant, the answer continues that message.
        goes_on = messages[-1]["role"] == "assistant"
        output = self.output_config or OutputConfig()
        form = output.format or self.output_format
        schema = form and {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        return {
            "model": self.model,
            "messages": messages,
            "continue_final_message": goes_on or None,
            "reasoning_effort": output.effort,
            "response_format": schema,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": self.tool_choice and self.tool_choice.as_chat(),
            "parallel_tool_calls": not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            "chat_template_kwargs": self._template_variables(),
        }

    def _template_variables(self) -> dict[str, Any] | None:
        thinks = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        return thinks | (self.chat_template_kwargs or {}) or None


class MessagesBody(CountBody, SharedWithChat):
    """`POST /v1/messages`."""

    unserved: ClassVar[Mapping[str, Unserved]] = {**of_parts("/v1/messages"), **ANTHROPIC_MESSAGE}

    max_tokens: int = Field(ge=1, le=INT32_MAX)
    stop_sequences: list[str] | None = None
    metadata: Any = None
    """Ignored, because the field cannot change the result."""

    def _chat_fields(self) -> dict[str, Any]:
        own = {"max_tokens": self.max_tokens, "stop": self.stop_sequences or None}
        return {**self.shared_fields(), **super()._chat_fields(), **own}


def _chat_tool(tool: AnthropicTool | HostedTool) -> dict[str, Any]:
    # A tool that is not a function keeps its place in the list. The chat request later reports the tool as ignored, by
    # its index in the list, so the index must be the same in both requests.
    return {"type": tool.type} if isinstance(tool, HostedTool) else tool.as_chat()
