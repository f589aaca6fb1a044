"""Parsers of tool calls between marks. Each call is a header with the function's name, followed by JSON arguments. Each
format is described by a table of marks. Kimi's format is in this file, DeepSeek's formats are in `deepseek.py`.
"""

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from wingbeat.deployments.parsing.call_format import (
    Format,
    Function,
    between,
    calls,
    in_order,
    json_of,
    text,
    text_with_calls,
)
from wingbeat.deployments.parsing.formats.call_text import CallParser
from wingbeat.deployments.parsing.formats.json_call import SPACE, JsonValue
from wingbeat.deployments.parsing.message import unfinished

MOST_HEADER_CHARS = 256


class Marks(NamedTuple):
    """Marks of a format."""

    section: tuple[str, str]
    """Opening and closing mark of the section with all calls of an answer."""
    call: str
    """Opening mark of a call."""
    arguments: str
    """Mark between a call's header and its arguments."""
    ends: tuple[str, ...]
    """Marks that may follow the arguments, in this order; models sometimes omit some of the marks."""
    header: re.Pattern[str]
    """Pattern of a whole header, with the group `name`, and the group `id` if calls of this format have ids."""


class MarkedJsonParser(CallParser):
    """Parser of calls with text before and after them; a call with an invalid header or invalid arguments is answer
    text.
    """

    marks: ClassVar[Marks]

    @classmethod
    def calls_format(cls, functions: Sequence[Function], several: bool) -> Format:
        """Returns the format of calls without other text."""
        begin, end = cls.marks.section
        return in_order(text(begin), cls._calls(functions, several), text(end))

    @classmethod
    def text_format(cls, functions: Sequence[Function], several: bool) -> Format:
        """Returns the format of text that may be followed by calls."""
        begin, end = cls.marks.section
        return text_with_calls([between(begin, cls._calls(functions, several), end)], begin, several=False)

    @classmethod
    def _calls(cls, functions: Sequence[Function], several: bool) -> Format:
        return calls([cls._tag(function) for function in functions], "", several)

    @classmethod
    @abstractmethod
    def _tag(cls, function: Function) -> Format:
        """Returns the format of one call of a function."""

    def __init__(self) -> None:
        super().__init__()
        self._value = JsonValue()
        self._name = ""
        self._id: str | None = None

    def _read_text(self) -> bool:
        marks = (self.marks.section[0], self.marks.call)
        found = [(self._pending.find(mark), mark) for mark in marks if mark in self._pending]
        if not found:
            held = 0 if self._ended else unfinished(self._pending, marks)
            self._say(self._read(len(self._pending) - held))
            return False
        begin, mark = min(found)
        self._say(self._read(begin))
        self._raw, self._is_sent = self._read(len(mark)), False
        self._advance = self._read_section if mark == marks[0] else self._read_header
        return True

    _advance = _read_text

    def _read_section(self) -> bool:
        """Reads the text before the first call, between two calls, or after the last call."""
        begins = (self.marks.call, self.marks.section[1], *self.marks.ends)
        rest = self._pending.lstrip(SPACE)
        if any(mark.startswith(rest) and mark != rest for mark in begins):
            if not self._ended:
                return False
            if self._is_sent:
                # An answer that was cut off may end within a mark.
                rest = self._pending = ""
        space = self._read(len(self._pending) - len(rest))
        mark = next((mark for mark in begins if rest.startswith(mark)), "")
        read = space + self._read(len(mark))
        if mark == self.marks.call:
            self._raw, self._is_sent = ("" if self._is_sent else self._raw) + read, False
            self._advance = self._read_header
        elif mark in self.marks.ends and self._is_sent:
            pass
        else:
            self._raw += read
            self._leave(is_section_over=mark == self.marks.section[1])
        return True

    def _leave(self, is_section_over: bool = False) -> None:
        """Leaves the section of calls and continues with text; if the section had no call, its marks become answer text
        too.
        """
        if self._is_sent:
            self._raw = "" if is_section_over else self._raw
        if self._raw:
            self._drop_call()
        self._advance = self._read_text

    def _read_header(self) -> bool:
        mark = self.marks.arguments
        end = self._pending.find(mark)
        is_over = end > MOST_HEADER_CHARS or (end < 0 and len(self._pending) >= MOST_HEADER_CHARS + len(mark))
        if end < 0 and not is_over and not self._ended:
            return False
        header = None if end < 0 or is_over else self.marks.header.fullmatch(self._pending[:end])
        if header is None:
            self._drop_call()
            self._advance = self._read_text
            return True
        self._name, self._id = header["name"], header.groupdict().get("id")
        self._raw += self._read(end + len(mark))
        self._advance = self._read_before_arguments
        return True

    def _read_before_arguments(self) -> bool:
        """Reads up to the object with the arguments. If the end of the call comes first, the call has no arguments."""
        rest = self._pending.lstrip(SPACE)
        ends = self.marks.ends
        if not rest or (not self._ended and any(mark.startswith(rest) and mark != rest for mark in ends)):
            if self._ended:
                self._raw += self._read(len(self._pending))
            return False
        if rest.startswith("{"):
            self._read(len(self._pending) - len(rest))
            self._value, self._advance = JsonValue(), self._read_arguments
            self._begin("")
        elif rest.startswith(ends):
            self._begin("{}")
            self._advance = self._read_section
        else:
            self._drop_call()
            self._advance = self._read_text
        return True

    def _begin(self, arguments: str) -> None:
        self._raw, self._is_sent = "", True
        self._send(arguments, self._name, self._id)

    def _read_arguments(self) -> bool:
        if not self._send_value(self._value):
            return False
        self._advance = self._read_section
        return True


class KimiK2Parser(MarkedJsonParser):
    """Parser for Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

    The header is also the call's id, by which the chat template finds the call's result.
    """

    marks = Marks(
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call="<|tool_call_begin|>",
        arguments="<|tool_call_argument_begin|>",
        ends=("<|tool_call_end|>",),
        header=re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<:]+?):\d+)\s*"),
    )

    @classmethod
    def _tag(cls, function: Function) -> Format:
        number = in_order({"type": "regex", "pattern": r"\d{1,4}"}, text(cls.marks.arguments))
        begin = f"{cls.marks.call}functions.{function.name}:"
        return between(begin, in_order(number, json_of(function.schema)), cls.marks.ends[-1])
