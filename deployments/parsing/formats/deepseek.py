"""Parsers of DeepSeek's tool calls, which are written between marks that contain full-width characters."""

import re
from collections.abc import Sequence

from wingbeat.deployments.parsing.call_format import Format, Function, between, calls, json_of
from wingbeat.deployments.parsing.formats.marked_json import MarkedJsonParser, Marks


def _mark(words: str) -> str:
    """Returns a mark such as `<|tool_sep|>`, with full-width bars (U+FF5C) and low blocks (U+2581) for spaces."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


SECTION = (_mark("tool calls begin"), _mark("tool calls end"))
CALL, CALL_END = _mark("tool call begin"), _mark("tool call end")
SEPARATOR = _mark("tool sep")


class DeepSeekV31Parser(MarkedJsonParser):
    """Parser for DeepSeek V3.1, whose calls consist of the name, a separator and the arguments."""

    marks = Marks(
        section=SECTION,
        call=CALL,
        arguments=SEPARATOR,
        ends=(CALL_END,),
        header=re.compile(r"\s*(?P<name>[^\s<]+)\s*"),
    )

    @classmethod
    def _tag(cls, function: Function) -> Format:
        begin = f"{cls.marks.call}{function.name}{cls.marks.arguments}"
        return between(begin, json_of(function.schema), cls.marks.ends[-1])


class DeepSeekV3Parser(MarkedJsonParser):
    """Parser for DeepSeek V3 and R1, whose calls consist of the type, a separator, the name, and the arguments in a
    fenced block.
    """

    marks = Marks(
        section=SECTION,
        call=CALL,
        arguments="```json",
        ends=("```", CALL_END),
        header=re.compile(rf"\s*\w*{SEPARATOR}\s*(?P<name>[^\s<`]+)\s*"),
    )

    @classmethod
    def _calls(cls, functions: Sequence[Function], several: bool) -> Format:
        return calls([cls._tag(function) for function in functions], "\n", several)

    @classmethod
    def _tag(cls, function: Function) -> Format:
        begin = f"{cls.marks.call}function{SEPARATOR}{function.name}\n```json\n"
        return between(begin, json_of(function.schema), f"\n```{CALL_END}")
