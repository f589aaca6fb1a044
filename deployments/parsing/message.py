"""What some text brought to a message, and the machine that reads text so: a parser."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self

from wingbeat.deployments.parsing.call_format import Format, Function


def new_call_id() -> str:
    """An id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolCallDelta(NamedTuple):
    """What one tool call gained; its first one has the id and the name."""

    index: int
    arguments: str
    """JSON as the model writes it."""
    id: str | None = None
    name: str | None = None


class MessageDelta(NamedTuple):
    """What a message gained; the sum of all is the message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """At most one per call, in the calls' order."""

    def plus(self, other: "MessageDelta") -> "MessageDelta":
        """Both, one after the other."""
        calls = {call.index: call for call in self.tool_calls}
        for call in other.tool_calls:
            begun = calls.get(call.index)
            calls[call.index] = call if begun is None else begun._replace(arguments=begun.arguments + call.arguments)
        return MessageDelta(
            self.content + other.content,
            self.reasoning + other.reasoning,
            tuple(calls[index] for index in sorted(calls)),
        )


class Parser(ABC):
    """Reads one message's text; what it finds does not depend on how the text is cut into pieces."""

    keeps_special_tokens = False
    """Whether its marks may be special tokens, which text usually leaves out."""

    def know(self, functions: Sequence[Function]) -> Self:
        """The parser, told before any text which functions may be called, for formats whose arguments have no types."""
        return self

    @abstractmethod
    def push(self, text: str) -> MessageDelta:
        """What is final after this text."""

    @abstractmethod
    def flush(self) -> MessageDelta:
        """The rest, once no more text comes."""

    def cut(self) -> MessageDelta:
        """The rest of a text that a limit or a stop string ended: `flush` without the beginning of a mark or call."""
        return self.flush()

    def thinking_format(self) -> Format | None:
        """Of a reasoning parser: the form of thoughts that come before the answer; None where none come."""
        return None

    @classmethod
    def calls_format(cls, functions: Sequence[Function], several: bool) -> Format | None:
        """Of a tool-call parser: the form of an answer that calls these functions; None where it has none of its own.

        Args:
            functions: those that can be called.
            several: whether more than one call may be made.
        """
        return None

    @classmethod
    def text_format(cls, functions: Sequence[Function], several: bool) -> Format | None:
        """The same of an answer that may call them or not."""
        return None

    def parse(self, text: str) -> MessageDelta:
        """A whole text; the parser is used up."""
        return self.push(text).plus(self.flush())


class PlainText(Parser):
    """All text is the answer."""

    def push(self, text: str) -> MessageDelta:
        """The text."""
        return MessageDelta(text)

    def flush(self) -> MessageDelta:
        """Nothing is held back."""
        return MessageDelta()


class ReasoningThenCalls(Parser):
    """One parser takes the thoughts out, another one reads the rest."""

    def __init__(self, reasoning: Parser, answer: Parser) -> None:
        self._reasoning = reasoning
        self._answer = answer
        self.keeps_special_tokens = reasoning.keeps_special_tokens or answer.keeps_special_tokens

    def push(self, text: str) -> MessageDelta:
        """What both find."""
        return self._read_on(self._reasoning.push(text))

    def flush(self) -> MessageDelta:
        """What both held back."""
        return self._read_on(self._reasoning.flush()).plus(self._answer.flush())

    def cut(self) -> MessageDelta:
        """See `Parser`."""
        return self._read_on(self._reasoning.cut()).plus(self._answer.cut())

    def _read_on(self, delta: MessageDelta) -> MessageDelta:
        rest = self._answer.push(delta.content) if delta.content else MessageDelta()
        return delta._replace(content="").plus(rest)


class Filtered(Parser):
    """Leaves out what the caller does not want of a parser's message."""

    def __init__(self, parser: Parser, *, reasoning: bool = True, parallel_calls: bool = True) -> None:
        self._parser = parser
        self._reasoning = reasoning
        self._parallel_calls = parallel_calls
        self.keeps_special_tokens = parser.keeps_special_tokens

    def push(self, text: str) -> MessageDelta:
        """What is wanted of it."""
        return self._wanted(self._parser.push(text))

    def flush(self) -> MessageDelta:
        """What is wanted of the rest."""
        return self._wanted(self._parser.flush())

    def cut(self) -> MessageDelta:
        """See `Parser`."""
        return self._wanted(self._parser.cut())

    def _wanted(self, delta: MessageDelta) -> MessageDelta:
        calls = delta.tool_calls
        if not self._parallel_calls:
            calls = tuple(call for call in calls if call.index == 0)
        return MessageDelta(delta.content, delta.reasoning if self._reasoning else "", calls)


def unfinished(text: str, marks: tuple[str, ...]) -> int:
    """Characters at the end of a text that may be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks)) - 1)
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
