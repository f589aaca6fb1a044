"""Parsers of tool calls whose arguments are untyped text between tags, in the forms of Qwen3-Coder and GLM.

The type of each value comes from the function's schema. Each format is a class at the end of this file, with a table of
tags.
"""

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Self

from wingbeat.deployments.parsing.call_format import Format, Function, between, calls, json_of, text_with_calls
from wingbeat.deployments.parsing.formats.call_text import CallParser
from wingbeat.deployments.parsing.formats.json_call import SPACE
from wingbeat.deployments.parsing.formats.typed_text import ArgumentTypes, as_json, quoted
from wingbeat.deployments.parsing.message import unfinished

CALL, CALL_END = "<tool_call>", "</tool_call>"
MOST_HEADER_CHARS = 256


class Tags(NamedTuple):
    """Tags of a format."""

    begins: tuple[str, ...]
    """Tags that can begin a call. The first tag comes before the header; every other tag is itself the beginning of the
    header.
    """
    header: re.Pattern[str]
    """Pattern of the text before the first argument (or before the call's end if there are no arguments), with the
    group `name`.
    """
    key: tuple[str, str]
    """Tags around an argument's name."""
    value: tuple[str, str]
    """Tags around an argument's value; the opening tag may be empty."""
    ends: tuple[str, ...]
    """Tags that can end the arguments."""
    is_bare: bool
    """Whether the header is only a name, so that text counts as a header only if it is the name of a known function."""
    has_lines: bool
    """Whether a value is on separate lines. The line breaks before and after the value are then not part of it."""


class TaggedTextParser(CallParser):
    """Parser of calls that may have text around them."""

    tags: ClassVar[Tags]

    @classmethod
    def calls_format(cls, functions: Sequence[Function], several: bool) -> Format:
        """Returns the format of calls without other text."""
        return calls(cls._tags_of(functions), "\n", several)

    @classmethod
    def text_format(cls, functions: Sequence[Function], several: bool) -> Format:
        """Returns the format of text that may contain calls."""
        return text_with_calls(cls._tags_of(functions), CALL, several)

    @classmethod
    @abstractmethod
    def _tags_of(cls, functions: Sequence[Function]) -> list[Format]:
        """Returns a list with the format of a call of each function."""

    def __init__(self) -> None:
        super().__init__()
        self._types = ArgumentTypes()
        self._name = ""
        self._key = ""
        self._num_arguments = 0
        self._value = ""
        """Text so far of a value that is sent only when it is complete."""
        self._is_string = False
        self._has_begun = False

    def set_functions(self, functions: Sequence[Function]) -> Self:
        """See `Parser`."""
        self._types = ArgumentTypes(functions)
        return self

    def _read_text(self) -> bool:
        begin, mark = self._first(self.tags.begins)
        if not mark:
            held = 0 if self._ended else unfinished(self._pending, self.tags.begins)
            self._say(self._read(len(self._pending) - held))
            return False
        self._say(self._read(begin))
        self._raw, self._is_sent = self._read(len(mark)) if mark == CALL else "", False
        self._advance = self._read_header
        return True

    _advance = _read_text

    def _read_header(self) -> bool:
        stops = (self.tags.key[0], *self.tags.ends)
        end, mark = self._first(stops)
        is_over = (end if mark else len(self._pending) - max(map(len, stops))) > MOST_HEADER_CHARS
        if not mark and not is_over and not self._ended:
            return False
        header = self.tags.header.fullmatch(self._pending[:end]) if mark and not is_over else None
        if header is None or (self.tags.is_bare and not self._types.knows(header["name"])):
            # No call begins here, so the tag becomes answer text. A tag that is part of the header has not been read
            # yet; it is read here, because `_read_text` would otherwise find it again.
            self._raw += self._read(0 if self._raw else len(self.tags.begins[-1]))
            self._drop_call()
            self._advance = self._read_text
            return True
        self._read(end)
        self._name, self._num_arguments, self._raw, self._is_sent = header["name"], 0, "", True
        self._send("{", self._name)
        self._advance = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        """Reads up to the next argument or the end of the call; text between arguments is dropped."""
        marks = (self.tags.key[0], *self.tags.ends)
        begin, mark = self._first(marks)
        if not mark:
            self._read(len(self._pending) - unfinished(self._pending, marks))
            return False
        self._read(begin + len(mark))
        if mark == self.tags.key[0]:
            self._advance = self._read_key
        else:
            self._send("}")
            self._advance = self._read_text if mark == CALL_END else self._read_end
        return True

    def _read_key(self) -> bool:
        key, mark, rest = self._pending.partition(self.tags.key[1])
        if not mark:
            return False
        self._key, self._pending, self._advance = key.strip(), rest, self._read_before_value
        return True

    def _read_before_value(self) -> bool:
        begin = self.tags.value[0]
        rest = self._pending.lstrip(SPACE) if begin else self._pending
        if begin and begin.startswith(rest) and begin != rest:
            return False
        self._pending = rest.removeprefix(begin)
        self._value, self._has_begun = "", not self.tags.has_lines
        self._is_string = self._types.type_of(self._name, self._key).is_free_text
        comma = ", " if self._num_arguments else ""
        self._num_arguments += 1
        self._send(f"{comma}{quoted(self._key)}: " + ('"' if self._is_string else ""))
        self._advance = self._read_value
        return True

    def _read_value(self) -> bool:
        if not self._has_begun:
            self._pending, self._has_begun = self._pending.removeprefix("\n"), True
            if not self._pending:
                return False
        end = self.tags.value[1]
        # A line break before the closing tag belongs to the tag and not to the value.
        marks = (f"\n{end}", end) if self.tags.has_lines else (end,)
        begin, mark = self._first(marks)
        held = 0 if mark else unfinished(self._pending, marks)
        text = self._read(begin if mark else len(self._pending) - held)
        if self._is_string:
            self._send(quoted(text)[1:-1])
        else:
            self._value += text
        if not mark:
            return False
        self._read(len(mark))
        self._send('"' if self._is_string else as_json(self._value, self._types.type_of(self._name, self._key)))
        self._advance = self._read_arguments
        return True

    def _read_end(self) -> bool:
        """Reads the closing tag of a call, which models sometimes omit."""
        rest = self._pending.lstrip()
        if CALL_END.startswith(rest) and rest != CALL_END:
            if not self._ended:
                return False
            # An answer that was cut off may end within a tag.
            rest = ""
        self._pending = rest.removeprefix(CALL_END)
        self._advance = self._read_text
        return True

    def _first(self, marks: Sequence[str]) -> tuple[int, str]:
        """Returns position and text of the mark that comes first in `_pending`; the text is empty if there is none."""
        found = [(self._pending.find(mark), mark) for mark in marks if mark in self._pending]
        return min(found) if found else (-1, "")


class Qwen3CoderParser(TaggedTextParser):
    """`<tool_call>\\n<function=f>\\n<parameter=k>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>`."""

    tags = Tags(
        begins=(CALL, "<function="),
        header=re.compile(r"\s*<function=\s*(?P<name>[^<>\s]+)\s*>\s*"),
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        ends=("</function>", CALL_END),
        is_bare=False,
        has_lines=True,
    )

    @classmethod
    def _tags_of(cls, functions: Sequence[Function]) -> list[Format]:
        return [
            between(f"{CALL}\n<function={name}>\n", json_of(schema, "qwen_xml"), f"\n</function>\n{CALL_END}")
            for name, schema in functions
        ]


class Glm45Parser(TaggedTextParser):
    """`<tool_call>f\\n<arg_key>k</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>`."""

    tags = Tags(
        begins=(CALL,),
        header=re.compile(r"\s*(?P<name>[^\s<>{}\[\]\"]+)\s*"),
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
        ends=(CALL_END,),
        is_bare=True,
        has_lines=False,
    )

    @classmethod
    def _tags_of(cls, functions: Sequence[Function]) -> list[Format]:
        return [between(f"{CALL}{name}\n", json_of(schema, "glm_xml"), CALL_END) for name, schema in functions]
