"""Parsers by name, or of a user by import path; which ones a server has."""

from collections.abc import Callable, Sequence
from typing import Self

from wingbeat.deployments.parsing.call_format import Format, Function, in_order
from wingbeat.deployments.parsing.harmony import HarmonyParser
from wingbeat.deployments.parsing.message import Parser, PlainText, ReasoningThenCalls
from wingbeat.deployments.parsing.names import (
    BY_TEMPLATE,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    load_parser,
)
from wingbeat.deployments.parsing.recognition import recognise


class Parsers:
    """The parsers of one server; without any, text is text."""

    def __init__(
        self, tool_call_parser: str | None = None, reasoning_parser: str | None = None, *, shows_tools: bool = True
    ) -> None:
        """Takes names, or import paths.

        Args:
            shows_tools: whether the chat template reads a request's tools.

        Raises:
            ValueError: there is none of a name; says which there are.
        """
        self.names = tool_call_parser, reasoning_parser
        self.shows_tools = shows_tools
        self._calls = load_parser(tool_call_parser, TOOL_CALL_PARSERS, "tool_call_parser")
        self._reasoning = load_parser(reasoning_parser, REASONING_PARSERS, "reasoning_parser")
        # Thoughts, calls and answers of this format are one stream of messages, which one parser reads.
        self._is_harmony = HarmonyParser in (self._calls, self._reasoning)
        if self._is_harmony:
            self._reasoning = None

    @classmethod
    def of_template(cls, tool_call_parser: str | None, reasoning_parser: str | None, template: str | None) -> Self:
        """Those of names, each of which may be `BY_TEMPLATE`; raises as `Parsers`."""
        found = recognise(template)
        calls = found.tool_call_parser if tool_call_parser == BY_TEMPLATE else tool_call_parser
        thoughts = found.reasoning_parser if reasoning_parser == BY_TEMPLATE else reasoning_parser
        return cls(calls, thoughts, shows_tools=found.shows_tools)

    def describe(self) -> str:
        """One line of what is found in answers, for a start."""
        calls, thoughts = self.names
        if calls:
            of_calls = f"tool calls are read as {calls}"
        elif self.shows_tools:
            of_calls = "tool calls are left in the text, as the chat template has no form of them that is known"
        else:
            of_calls = "the chat template shows the model no tools"
        return f"{of_calls}; {f'thoughts are read as {thoughts}' if thoughts else 'thoughts are not looked for'}"

    @property
    def read_calls(self) -> bool:
        """Whether calls in the model's own format are found."""
        return self._calls is not None

    def calls_format(
        self, functions: Sequence[Function], several: bool, *, required: bool, prompt: str
    ) -> Format | None:
        """The form of an answer with calls in the model's own format, and thoughts before it.

        None where this is not known.
        """
        if self._calls is None:
            return None
        form = (self._calls.calls_format if required else self._calls.text_format)(functions, several)
        # Harmony's own form has the thoughts in it.
        return form if form is None or self._is_harmony else self.behind_thoughts(prompt, form)

    def behind_thoughts(self, prompt: str, answer: Format) -> Format:
        """The form of an answer with what may or must come before it."""
        thoughts = self.thoughts_format(prompt)
        return answer if thoughts is None else in_order(thoughts, answer)

    def thoughts_format(self, prompt: str) -> Format | None:
        """The form of what may or must come before an answer; None where nothing does."""
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
        """A parser for one message.

        Args:
            prompt: the text before it.
            calls: whether it may hold calls in the model's own format.
            answer: reads what is not thoughts, in place of the server's own parser.
            functions: that may be called.
        """
        if self._is_harmony and answer is None:
            return HarmonyParser()
        own = self._calls().know(functions) if calls and self._calls else PlainText()
        rest = answer() if answer else own
        if self._reasoning is None:
            return rest
        return ReasoningThenCalls(self._reasoning(prompt), rest)
