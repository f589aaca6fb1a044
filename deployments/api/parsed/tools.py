"""Tools in a chat request: their definitions, `tool_choice`, and calls in earlier messages."""

import json
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from wingbeat.deployments.api.bodies.chat_fields import ChatFields, MessageFields
from wingbeat.deployments.api.bodies.request_body import read_part
from wingbeat.deployments.api.bodies.unserved_fields import Part, ignored_fields
from wingbeat.deployments.api.errors import ApiError, invalid, shown

MAX_TOOLS = 512
MAX_NAME_CHARS = 128
WORDS = ("none", "auto", "required")
_OWN_FIELDS = {"tool_calls": "assistant", "reasoning": "assistant", "reasoning_content": "assistant"}
_OWN_FIELDS["tool_call_id"] = "tool"
Kind = TypeVar("Kind", bound=Part)


class Function(Part):
    """A function: name, description, and a JSON schema of its arguments."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether generation is constrained to arguments that match the schema."""

    def schema_of_arguments(self) -> dict[str, Any]:
        """Returns the JSON schema of the arguments; a function without schema gets the schema of any object."""
        return self.parameters or {"type": "object"}


class Tool(Part):
    """A tool of a request; only functions are supported."""

    type: Literal["function"]
    function: Function


class NamedFunction(Part):
    """Name of a function to call."""

    name: str


class NamedTool(Part):
    """Value of `tool_choice` that names a function, which must then be called."""

    type: Literal["function"]
    function: NamedFunction


class HostedTool(NamedTuple):
    """A tool that is not a function of the client, such as a service's web search. Such tools are not supported."""

    index: int
    """Index in the request's list of tools."""
    type: str

    def pass_over(self) -> None:
        """Records the tool as ignored.

        Raises:
            ApiError: 400, if the setting `unknown_fields` refuses ignored fields.
        """
        path = f"tools[{self.index}]"
        if ignored_fields().refuses:
            message = f"Tools of type {shown(self.type)!r} are not supported; only functions are."
            raise ApiError(message, param=f"{path}.type", code="unsupported_value")
        ignored_fields().name(path, self.type)


class FunctionCall(Part):
    """A called function with its arguments as JSON text.

    Any text and any JSON value is accepted as arguments, because the arguments may come from a model whose text was not
    JSON or was cut off.
    """

    name: str
    arguments: str = "{}"

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        if value is None or (isinstance(value, str) and not value.strip()):
            return "{}"
        return value if isinstance(value, str) else json.dumps(value)


class ToolCall(Part):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Index of the call in a stream; ignored, because the index only repeats the call's position in the list."""

    def as_template_input(self, is_strict: bool) -> dict[str, Any]:
        """Returns the call for a chat template, with its arguments as an object, as transformers' templates expect.

        Args:
            is_strict: whether arguments that are not a JSON object (for example because the call was cut off) are
                replaced by an empty object; if False, they remain text.
        """
        fields = self.model_dump(exclude_none=True, exclude={"index"})
        arguments = _arguments(self.function.arguments)
        fields["function"]["arguments"] = {} if is_strict and isinstance(arguments, str) else arguments
        return fields


class CallFields(MessageFields):
    """Fields of a message about calls and reasoning."""

    tool_calls: list[ToolCall] | None = Field(None, min_length=1)
    """Calls of an assistant's message."""
    tool_call_id: str | None = None
    """Id of the call that a tool's message answers."""
    reasoning: str | None = None
    """Reasoning of an assistant's message, under the same name as in answers of this server."""
    reasoning_content: str | None = None
    """Other name of `reasoning`."""

    @model_validator(mode="before")
    @classmethod
    def _has_text(cls, value: Any) -> Any:
        calls = isinstance(value, dict) and value.get("content") is None and value.get("tool_calls")
        return {**value, "content": ""} if calls else value

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _none_of_no_calls(cls, value: Any) -> Any:
        return None if value == [] else value

    @model_validator(mode="after")
    def _check_own_fields(self) -> Self:
        for name, role in _OWN_FIELDS.items():
            if getattr(self, name) is not None and self.role != role:
                raise ValueError(f"'{name}' belongs to messages of role '{role}'")
        return self

    def template_fields(self, is_strict: bool) -> dict[str, Any]:
        """See `MessageFields`; reasoning is passed under both names."""
        fields: dict[str, Any] = {"tool_call_id": self.tool_call_id}
        if self.tool_calls is not None:
            fields["tool_calls"] = [call.as_template_input(is_strict) for call in self.tool_calls]
        fields |= dict.fromkeys(("reasoning_content", "reasoning"), self.reasoning_content or self.reasoning)
        return {name: value for name, value in fields.items() if value is not None}


class ToolFields(ChatFields):
    """Fields of a chat request about tools and reasoning."""

    template_names: ClassVar[tuple[str, ...]] = ("tools",)

    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = Field(None, json_schema_extra={"anyOf": [{"type": "string"}, {"type": "object"}]})
    """"none", "auto", "required", or a `NamedTool`; by default "auto" if the request has tools."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls; false keeps only the first call."""
    include_reasoning: bool | None = None
    """Whether the answer includes the reasoning. The model generates the reasoning in either case."""

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

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        check_choice(self.tool_choice, self.tools or [])
        if self.continue_final_message and self.messages[-1].tool_calls:
            raise invalid("continue_final_message", "needs a last message that is text")
        return self

    @property
    def calls(self) -> str | NamedTool:
        """Calls that the answer may or must have: "none", "auto", "required" or a `NamedTool`."""
        if self.tool_choice is None or not self.tools:
            return "auto" if self.tools else "none"
        return self.tool_choice


def read_tools(value: Any, kind: type[Kind], own_types: tuple[str | None, ...]) -> list[Kind | HostedTool]:
    """Parses a request's `tools`.

    Args:
        kind: class of the client's functions.
        own_types: values of the field `type` that mark a function of the client.

    Raises:
        ApiError: 400, naming the tool that is malformed.
    """
    if not isinstance(value, list):
        raise ApiError("Invalid 'tools': must be a list of tools.", param="tools", code="invalid_type")
    tools: list[Kind | HostedTool] = []
    for index, tool in enumerate(value[: MAX_TOOLS + 1]):
        type_ = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(type_, str) and type_ not in own_types:
            tools.append(HostedTool(index, type_))
        else:
            tools.append(read_part(kind, tool, f"tools[{index}]"))
    return tools


def read_choice(value: Any) -> str | NamedTool:
    """Parses a `tool_choice`, which is one of `WORDS` or names the function to call.

    Raises:
        ApiError: the value is neither.
    """
    if isinstance(value, str) and value in WORDS:
        return value
    try:
        return NamedTool.model_validate(value)
    except ValidationError:
        form = '{"type": "function", "function": {"name": ...}}'
        raise invalid("tool_choice", f"must be one of {', '.join(WORDS)}, or {form}") from None


def check_choice(choice: str | NamedTool | None, tools: list[Tool]) -> None:
    """Raises ApiError if `choice` needs calls but there are no tools, or if its function is not among the tools."""
    if not tools and choice not in (None, "none", "auto"):
        raise invalid("tool_choice", "is allowed only if 'tools' has a function")
    if isinstance(choice, NamedTool) and choice.function.name not in {tool.function.name for tool in tools}:
        raise invalid("tool_choice", f"names the function {shown(choice.function.name)!r}, which is not among 'tools'")


def shows_no_tools() -> ApiError:
    """Returns a 400 for tools that the chat template does not show to the model."""
    message = (
        "The model's chat template does not show tools to the model: leave 'tools' out, set "
        "'tool_choice' to 'required' or a function, or start the server with a --tool-call-parser."
    )
    return ApiError(message, param="tools", code="unsupported_value")


def _arguments(text: str) -> dict[str, Any] | str:
    """Parses a call's arguments; returns an object, or the unchanged text if it is not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return {} if value is None else value if isinstance(value, dict) else text
