"""Deltas of messages, and the base class of the parsers that produce deltas from text."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self

from wingbeat.deployments.parsing.call_format import Format, Function


def new_call_id() -> str:
    """Returns a random id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolCallDelta(NamedTuple):
    """New text of one tool call; the first delta of a call has its id and name."""

    index: int
    arguments: str
    """Part of the JSON of the arguments, as the model has written it."""
    id: str | None = None
    name: str | None = None


class MessageDelta(NamedTuple):
    """New content of a message; all deltas joined are the message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """At most one delta for each call, in the order of the calls."""

    def plus(self, other: "MessageDelta") -> "MessageDelta":
        """Returns the delta that joins this delta and `other`, in this order."""
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
    """Incremental parser of one message. Its result does not depend on how the text is divided into pieces."""

    keeps_special_tokens = False
    """Whether the text must be decoded with special tokens, because the parser's marks may be special tokens."""

    def set_functions(self, functions: Sequence[Function]) -> Self:
        """Sets the functions that may be called, which some formats need; returns the parser itself."""
        return self

    @abstractmethod
    def push(self, text: str) -> MessageDelta:
        """Reads text; returns the new part of the message. Text whose meaning depends on later text is held back."""

    @abstractmethod
    def flush(self) -> MessageDelta:
        """Called when the text has ended; returns the rest of the message, which was held back."""

    def cut(self) -> MessageDelta:
        """Called instead of `flush` if the text was cut off; returns the rest of the message without an incomplete mark
        or call at its end.
        """
        return self.flush()

    def thinking_format(self) -> Format | None:
        """For a reasoning parser: returns the format of the reasoning before the answer; None if there is no
        reasoning.
        """
        return None

    @classmethod
    def calls_format(cls, functions: Sequence[Function], several: bool) -> Format | None:
        """For a tool-call parser: returns the format of an answer that consists of calls of these functions; None if
        the parser defines no format.

        Args:
            functions: functions that may be called.
            several: whether more than one call may be made.
        """
        return None

    @classmethod
    def text_format(cls, functions: Sequence[Function], several: bool) -> Format | None:
        """For a tool-call parser: returns the format of a text that may contain calls of these functions; None if the
        parser defines no format.
        """
        return None

    def parse(self, text: str) -> MessageDelta:
        """Parses a whole text; the parser cannot be used again."""
        return self.push(text).plus(self.flush())


class PlainText(Parser):
    """Parser for which the whole text is the answer."""

    def push(self, text: str) -> MessageDelta:
        """Returns the text."""
        return MessageDelta(text)

    def flush(self) -> MessageDelta:
        """Returns an empty delta, because `push` holds no text back."""
        return MessageDelta()


class ReasoningThenCalls(Parser):
    """Combines two parsers: one extracts reasoning, the other reads the remaining text."""

    def __init__(self, reasoning: Parser, answer: Parser) -> None:
        self._reasoning = reasoning
        self._answer = answer
        self.keeps_special_tokens = reasoning.keeps_special_tokens or answer.keeps_special_tokens

    def push(self, text: str) -> MessageDelta:
        """Reads text; returns the reasoning and calls that the two parsers find."""
        return self._read_on(self._reasoning.push(text))

    def flush(self) -> MessageDelta:
        """Returns the parts of the message that the two parsers have held back."""
        return self._read_on(self._reasoning.flush()).plus(self._answer.flush())

    def cut(self) -> MessageDelta:
        """See `Parser`."""
        return self._read_on(self._reasoning.cut()).plus(self._answer.cut())

    def _read_on(self, delta: MessageDelta) -> MessageDelta:
        rest = self._answer.push(delta.content) if delta.content else MessageDelta()
        return delta._replace(content="").plus(rest)


class Filtered(Parser):
    """Wraps a parser and drops reasoning or parallel calls that the caller does not want."""

    def __init__(self, parser: Parser, *, reasoning: bool = True, parallel_calls: bool = True) -> None:
        self._parser = parser
        self._reasoning = reasoning
        self._parallel_calls = parallel_calls
        self.keeps_special_tokens = parser.keeps_special_tokens

    def push(self, text: str) -> MessageDelta:
        """Reads text; returns the parser's delta without the parts to drop."""
        return self._wanted(self._parser.push(text))

    def flush(self) -> MessageDelta:
        """Returns the rest of the message without the parts to drop."""
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
    """Returns the number of characters at the end of a text that may be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks)) - 1)
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
