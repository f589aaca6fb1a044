"""Tools in a chat request: which there are, and which the model may or must call."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from wingbeat.deployments.api.errors import ApiError, invalid, shown

MAX_TOOLS = 512
MAX_NAME_CHARS = 128
WORDS = ("none", "auto", "required")


class Function(BaseModel):
    """What a tool does, and a JSON schema of its arguments."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether the arguments must follow the schema whatever the model would write."""

    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments; without one they are any object."""
        return self.parameters or {"type": "object"}


class Tool(BaseModel):
    """One function."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str


class NamedTool(BaseModel):
    """The one tool that must be called."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: NamedFunction


class FunctionCall(BaseModel):
    """What was called, with which arguments as JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    arguments: str

    @field_validator("arguments", mode="before")
    @classmethod
    def _empty_is_no_arguments(cls, value: Any) -> Any:
        return "{}" if value in (None, "") else value


class ToolCall(BaseModel):
    """A call in an assistant's message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """As streams number calls; it says nothing more than the order."""


def read_choice(value: Any) -> str | NamedTool:
    """A `tool_choice`: one of the words, or the one function to call.

    Raises:
        ApiError: it is neither.
    """
    if isinstance(value, str) and value in WORDS:
        return value
    try:
        return NamedTool.model_validate(value)
    except ValidationError:
        form = '{"type": "function", "function": {"name": ...}}'
        raise invalid("tool_choice", f"must be one of {', '.join(WORDS)}, or {form}") from None


def check_choice(choice: str | NamedTool | None, tools: list[Tool]) -> None:
    """Raises ApiError for a `tool_choice` that no model could follow with these tools."""
    if not tools and choice not in (None, "none", "auto"):
        raise invalid("tool_choice", "is allowed only where 'tools' are given")
    if isinstance(choice, NamedTool) and choice.function.name not in {tool.function.name for tool in tools}:
        raise invalid("tool_choice", f"names the function {shown(choice.function.name)!r}, which is not among 'tools'")


def needs_parser() -> ApiError:
    """400 for tools that a server without a parser would not find in the model's text."""
    message = (
        "'auto' tool choice needs a parser of tool calls: start the server with --tool-call-parser, "
        "or set 'tool_choice' to 'none', 'required' or a function."
    )
    return ApiError(message, param="tool_choice", code="unsupported_value")
