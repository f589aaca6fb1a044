"""Request body of `/v1/responses`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from wingbeat.deployments.api.bodies.chat_requests import ChatBody, Effort
from wingbeat.deployments.api.bodies.unserved_fields import (
    CHECKS,
    COMMON,
    NO_STATE,
    TEXT_ALONE,
    Part,
    Unserved,
    hint,
    ignored_fields,
    of_parts,
    passed_over,
    refused,
)
from wingbeat.deployments.api.errors import ApiError, invalid, shown, unsupported
from wingbeat.deployments.api.parsed.shared_with_chat import SharedWithChat
from wingbeat.deployments.api.parsed.tools import Function
from wingbeat.deployments.api.responses_api.input_items import chat_messages
from wingbeat.runtime.scheduling.request import INT32_MAX

RESPONSE: Mapping[str, Unserved] = {
    **COMMON,
    "mm_processor_kwargs": refused("the preprocessing of images and audio cannot be changed"),
    "previous_input_messages": refused(f"{NO_STATE}: send the whole input", []),
    "enable_response_messages": passed_over("the answer has no such field", False),
    "previous_response_id": refused(f"{NO_STATE}: send the whole input"),
    "conversation": refused(f"{NO_STATE}: send the whole input"),
    "background": refused(f"{NO_STATE}, so that nobody could fetch the response", False),
    "background_options": refused(NO_STATE),
    "prompt": refused(f"{NO_STATE}: send its text"),
    "top_logprobs": refused("log-probabilities are told in chat completions", 0),
    "moderation": refused(CHECKS),
    "access_programs": refused("this server has no access programs"),
    "image": refused(TEXT_ALONE),
    "context_management": passed_over("an input that is too long is refused, not shortened", []),
    "truncation": passed_over("an input that is too long is refused, not shortened", "disabled"),
    "max_tool_calls": hint("it counts calls of hosted tools, of which there are none"),
}


SAME_IN_CHAT = ("tool_choice", "parallel_tool_calls", "stop", "include_reasoning", "user", "metadata")
"""Fields that have the same name in a chat request, in addition to the fields of `SharedWithChat`."""
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""For error messages: maps the name of a chat completion's field to the name of the Responses API's field."""
ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
_TOOL_FIELDS = frozenset(("type", *Function.model_fields))
_FORMAT_FIELDS = frozenset(("type", "name", "description", "schema", "strict"))


class Reasoning(Part):
    """Options for the model's reasoning. Answers contain the whole reasoning; summaries are not made."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(Part):
    """Format of the answer's text."""

    format: dict[str, Any] | None = None
    """`{"type": "text"}`, `{"type": "json_object"}` or `{"type": "json_schema", "name", "schema", "strict"}`."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Ignored, because no chat template reads this field."""


class StreamOptions(Part):
    """Options of a stream. The last event always has the usage, whatever the options are."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(SharedWithChat):
    """`POST /v1/responses`."""

    unserved: ClassVar[Mapping[str, Unserved]] = {**of_parts("/v1/responses"), **RESPONSE}

    input: Any = Field(json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}]})
    """A text, or a list of items: messages, `reasoning`, `function_call` and `function_call_output`."""
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    metadata: Any = None
    user: Any = None
    stop: Any = None
    """Extension: stop strings, as in a chat request."""
    include_reasoning: bool | None = None

    @field_validator("input")
    @classmethod
    def _check_input(cls, value: Any) -> Any:
        if not value or not isinstance(value, str | list):
            raise invalid("input", "must be a text or a list of items, and not empty")
        return value

    def as_chat(self) -> ChatBody:
        """Returns the request in the form of a chat request.

        Raises:
            ApiError: 400, a field is invalid. The error contains the name that the field has in a chat request; the
                caller translates this name by `NAMES`.
        """
        self._pass_over()
        messages = chat_messages(self.instructions, self.input)
        fields = self.shared_fields() | {name: getattr(self, name) for name in SAME_IN_CHAT}
        fields |= {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "response_format": _response_format(self.text and self.text.format),
            "tools": [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())],
            "tool_choice": _chat_choice(self.tool_choice),
        }
        return ChatBody.of_fields({name: value for name, value in fields.items() if value is not None})

    def _pass_over(self) -> None:
        """Records unsupported values of `text.verbosity` and `include` as ignored.

        Raises ApiError if log-probabilities are requested, because they cannot be returned; also raises ApiError for
        each of the ignored values if the setting `unknown_fields` is `refuse`.
        """
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            if ignored_fields().refuses:
                raise unsupported("text.verbosity", "no chat template reads it")
            ignored_fields().name("text.verbosity")
        for index, name in enumerate(self.include or ()):
            if name == LOGPROBS or (name != ENCRYPTED and ignored_fields().refuses):
                raise ApiError(
                    f"{shown(name)!r} is not supported.", param=f"include[{index}]", code="unsupported_value"
                )
            if name != ENCRYPTED:
                ignored_fields().name(f"include[{index}]", name)


def _chat_tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        # A tool that is not a function keeps its place in the list. The chat request later reports the tool as ignored,
        # by its index in the list, so the index must be the same in both requests.
        return {"type": kind}
    ignored_fields().pass_over_unknown(tool, _TOOL_FIELDS, path)
    fields = {name: tool[name] for name in Function.model_fields if name in tool}
    return {"type": "function", "function": fields}


def _chat_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {name: value for name, value in choice.items() if name != "type"}}
    return choice


def _response_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    if form is None:
        return None
    ignored_fields().pass_over_unknown(form, _FORMAT_FIELDS, "text.format")
    fields = {name: form[name] for name in _FORMAT_FIELDS & form.keys()}
    if fields.get("type") != "json_schema":
        return fields
    return {"type": fields.pop("type"), "json_schema": fields}
