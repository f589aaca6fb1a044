"""Tool calls of DeepSeek's models, between marks that no keyboard has."""

import re
from collections.abc import Sequence

from wingbeat.deployments.parsing.call_format import Format, Function, between, calls, json_of
from wingbeat.deployments.parsing.marked_json import MarkedJsonParser, Marks


def _mark(words: str) -> str:
    """`<|tool_sep|>` with a wide bar and a low block."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


SECTION = (_mark("tool calls begin"), _mark("tool calls end"))
CALL, CALL_END = _mark("tool call begin"), _mark("tool call end")
SEPARATOR = _mark("tool sep")


class DeepSeekV31Parser(MarkedJsonParser):
    """DeepSeek V3.1's: the name, and behind the separator the arguments."""

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
    """DeepSeek V3's and R1's: the type before the name, and the arguments in a fenced block."""

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
