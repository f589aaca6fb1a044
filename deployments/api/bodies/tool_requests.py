"""Tools in a chat request: which there are, and which the model may or must call."""

import json
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import Field, ValidationError, field_validator

from wingbeat.deployments.api.bodies.request_body import read_part
from wingbeat.deployments.api.bodies.unserved_fields import Part, ignored_fields
from wingbeat.deployments.api.errors import ApiError, invalid, shown

MAX_TOOLS = 512
MAX_NAME_CHARS = 128
WORDS = ("none", "auto", "required")
Kind = TypeVar("Kind", bound=Part)


class Function(Part):
    """What a tool does, and a JSON schema of its arguments."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether the arguments must follow the schema whatever the model would write."""

    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments; without one they are any object."""
        return self.parameters or {"type": "object"}


class Tool(Part):
    """One function."""

    type: Literal["function"]
    function: Function


class NamedFunction(Part):
    """The name of a function."""

    name: str


class NamedTool(Part):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class FunctionCall(Part):
    """What was called, with which arguments as JSON.

    A model may have written arguments that are no JSON, or was cut in them: every text is taken, and every JSON value.
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
    """As streams number calls; it says nothing more than the order."""


class HostedTool(NamedTuple):
    """A tool that no function of the client is, such as a web search of another service: no model here can use it."""

    index: int
    """In the request's list."""
    type: str

    def pass_over(self) -> None:
        """Leave it out of the tools, by name.

        Raises:
            ApiError: 400, where what is passed over is refused by setting.
        """
        path = f"tools[{self.index}]"
        if ignored_fields().refuses:
            message = f"Tools of type {shown(self.type)!r} are not supported; only functions are."
            raise ApiError(message, param=f"{path}.type", code="unsupported_value")
        ignored_fields().name(path, self.type)


def read_tools(value: Any, kind: type[Kind], own_types: tuple[str | None, ...]) -> list[Kind | HostedTool]:
    """The tools of a request's `tools`.

    Args:
        own_types: what the `type` of a function of the client says.

    Raises:
        ApiError: 400 naming the tool that is malformed.
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
        raise invalid("tool_choice", "is allowed only where 'tools' has a function")
    if isinstance(choice, NamedTool) and choice.function.name not in {tool.function.name for tool in tools}:
        raise invalid("tool_choice", f"names the function {shown(choice.function.name)!r}, which is not among 'tools'")


def shows_no_tools() -> ApiError:
    """400 for tools that the model would never see."""
    message = (
        "The model's chat template shows it no tools, so that it could not choose one: leave 'tools' out, set "
        "'tool_choice' to 'required' or a function, or start the server with a --tool-call-parser."
    )
    return ApiError(message, param="tools", code="unsupported_value")
