"""The parsers of a server, chosen by name, by import path or by the chat template."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from wingbeat.deployments.parsing.call_format import Format, Function, in_order
from wingbeat.deployments.parsing.formats.harmony import HarmonyParser
from wingbeat.deployments.parsing.message import Parser, PlainText, ReasoningThenCalls
from wingbeat.deployments.parsing.names import (
    BY_TEMPLATE,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    load_parser,
)

_WIDE = "<\uff5c"
CALL_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", (r"<\|channel\|>",)),
    ("deepseek_v3", (f"{_WIDE}tool\u2581calls\u2581begin", "```json")),
    ("deepseek_v31", (f"{_WIDE}tool\u2581calls\u2581begin",)),
    ("kimi_k2", (r"<\|tool_calls_section_begin\|>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral", (r"\[TOOL_CALLS\]",)),
    ("hermes", (r"<tool_call>",)),
    ("pythonic", (r"\[\w+\(\w+=",)),
    ("pythonic", (r"<function_calls>",)),
    ("llama3_json", (r"<\|python_tag\|>",)),
    ("llama3_json", (r"\{\s*\\?\"name\\?\":", r"\"parameters\\?\":")),
)
"""Tool-call parsers, each with regular expressions. The chosen parser is the first whose expressions all match the
template.
"""
REASONING_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", (r"<\|channel\|>",)),
    ("mistral", (r"\[THINK\]",)),
    ("qwen3", (r"</think>",)),
)
"""Reasoning parsers, with regular expressions as in `CALL_MARKS`."""
_TOOLS = re.compile(r"\btools\b")


class Recognised(NamedTuple):
    """Names of the parsers chosen by a chat template."""

    tool_call_parser: str | None
    reasoning_parser: str | None
    shows_tools: bool
    """Whether the template shows a request's tools to the model."""


def recognise(template: str | None) -> Recognised:
    """Chooses parsers by a chat template; chooses no parsers if there is no template."""
    template = template or ""
    shows_tools = _TOOLS.search(template) is not None
    calls = _first(CALL_MARKS, template) if shows_tools else None
    return Recognised(calls, _first(REASONING_MARKS, template), shows_tools)


def _first(marks: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str | None:
    return next((name for name, all_of in marks if all(re.search(mark, template) for mark in all_of)), None)


class Parsers:
    """Tool-call parser and reasoning parser of one model, each optional. Without parsers, all text is the answer."""

    def __init__(
        self, tool_call_parser: str | None = None, reasoning_parser: str | None = None, *, shows_tools: bool = True
    ) -> None:
        """Loads the parsers by name or import path.

        Args:
            shows_tools: whether the chat template shows a request's tools to the model.

        Raises:
            ValueError: there is no parser with this name; the message lists the known names.
        """
        self.names = tool_call_parser, reasoning_parser
        self.shows_tools = shows_tools
        self._calls = load_parser(tool_call_parser, TOOL_CALL_PARSERS, "tool_call_parser")
        self._reasoning = load_parser(reasoning_parser, REASONING_PARSERS, "reasoning_parser")
        # In the harmony format, reasoning, calls and answers are one stream of messages, so a single parser reads all
        # of them.
        self._is_harmony = HarmonyParser in (self._calls, self._reasoning)
        if self._is_harmony:
            self._reasoning = None

    @classmethod
    def of_template(cls, tool_call_parser: str | None, reasoning_parser: str | None, template: str | None) -> Self:
        """Loads parsers by name.

        For the name `BY_TEMPLATE`, the parser is chosen by the chat template. Raises the errors of `Parsers`.
        """
        found = recognise(template)
        calls = found.tool_call_parser if tool_call_parser == BY_TEMPLATE else tool_call_parser
        thoughts = found.reasoning_parser if reasoning_parser == BY_TEMPLATE else reasoning_parser
        return cls(calls, thoughts, shows_tools=found.shows_tools)

    def describe(self) -> str:
        """Returns a line that names the parsers, for the log at start."""
        calls, thoughts = self.names
        if calls:
            of_calls = f"tool calls are read as {calls}"
        elif self.shows_tools:
            of_calls = "tool calls are left in the text, because the chat template has no known call format"
        else:
            of_calls = "the chat template does not show tools to the model"
        return f"{of_calls}; {f'reasoning is read as {thoughts}' if thoughts else 'reasoning is not parsed'}"

    @property
    def read_calls(self) -> bool:
        """Whether there is a parser for the model's own call format."""
        return self._calls is not None

    def calls_format(
        self, functions: Sequence[Function], several: bool, *, required: bool, prompt: str
    ) -> Format | None:
        """Returns the format of an answer with calls in the model's own format, including reasoning before the calls.

        Returns None if the call format is not known.
        """
        if self._calls is None:
            return None
        form = (self._calls.calls_format if required else self._calls.text_format)(functions, several)
        # Nothing is added here, because harmony's format already includes the reasoning.
        return form if form is None or self._is_harmony else self.behind_thoughts(prompt, form)

    def behind_thoughts(self, prompt: str, answer: Format) -> Format:
        """Returns the format of an answer, extended by the reasoning that may or must come before the answer."""
        thoughts = self.thoughts_format(prompt)
        return answer if thoughts is None else in_order(thoughts, answer)

    def thoughts_format(self, prompt: str) -> Format | None:
        """Returns the format of reasoning before an answer; None if there is no reasoning."""
        if self._is_harmony:
            return HarmonyParser().thinking_format()
        return None if self._reasoning is None else self._reasoning(prompt).thinking_format()

    def new(
        self,
        prompt: str,
        *,
        calls: bool = False,
        answer: Callable[[], Parser] | None = None,
        functions: Sequence[Function] = (),
    ) -> Parser:
        """Makes a parser for one message.

        Args:
            prompt: text before the message.
            calls: whether the message may contain calls in the model's own format.
            answer: makes the parser of the text that is not reasoning; if given, it replaces the server's tool-call
                parser.
            functions: functions that may be called.
        """
        if self._is_harmony and answer is None:
            return HarmonyParser()
        own = self._calls().set_functions(functions) if calls and self._calls else PlainText()
        rest = answer() if answer else own
        if self._reasoning is None:
            return rest
        return ReasoningThenCalls(self._reasoning(prompt), rest)
