"""Parsers of reasoning before an answer: `<think>...</think>answer`, where the opening mark may be in the prompt."""

from enum import Enum, auto

from wingbeat.deployments.parsing.call_format import Format, any_text_until, in_order, optional
from wingbeat.deployments.parsing.message import MessageDelta, Parser, unfinished


class _At(Enum):
    START = auto()
    THINKING = auto()
    ANSWER = auto()


class ThinkingParser(Parser):
    """Parser for which the text between the two marks is reasoning; the marks are dropped."""

    begin = "<think>"
    end = "</think>"
    opens = False
    """Whether an answer begins with reasoning even if the prompt does not end with the opening mark."""

    def __init__(self, prompt: str) -> None:
        """Makes the parser; `prompt` is the text before the answer, or the end of that text."""
        prompt = prompt.rstrip()
        self._opens = prompt.endswith(self.begin) or self.opens
        self._at = _At.ANSWER if prompt.endswith(self.end) else _At.START
        self._pending = ""

    def thinking_format(self) -> Format | None:
        """Returns the format of reasoning up to the closing mark.

        The reasoning is optional, unless the prompt ends with the opening mark or the model's answers always begin with
        reasoning.
        """
        if self._at is _At.ANSWER:
            return None
        space = {"type": "regex", "pattern": r"\n{0,2}"}
        if self._opens:
            return in_order(any_text_until(self.end), space)
        return optional(in_order(any_text_until(self.end, self.begin), space))

    def push(self, text: str) -> MessageDelta:
        """See `Parser`."""
        if self._at is _At.ANSWER and not self._pending:
            return MessageDelta(text)
        self._pending += text
        if self._at is _At.START and not self._read_start():
            return MessageDelta()
        return self._read_thoughts() if self._at is _At.THINKING else self._rest()

    def flush(self) -> MessageDelta:
        """Returns the text that was held back as the possible start of a mark, which at the end is ordinary text."""
        rest = self._rest()
        if self._at is _At.THINKING or (self._at is _At.START and self._opens):
            return MessageDelta(reasoning=rest.content)
        return rest

    def cut(self) -> MessageDelta:
        """Returns an empty delta. The text that was held back is dropped, because it is the beginning of a mark."""
        self._pending = ""
        return MessageDelta()

    def _read_start(self) -> bool:
        """Skips the opening mark if there is one; returns False if more text is needed to decide that."""
        text = self._pending.lstrip()
        if self.begin.startswith(text) and text != self.begin:
            return False
        is_marked = text.startswith(self.begin)
        if is_marked:
            self._pending = text[len(self.begin) :]
        self._at = _At.THINKING if is_marked or self._opens else _At.ANSWER
        return True

    def _read_thoughts(self) -> MessageDelta:
        thoughts, mark, answer = self._pending.partition(self.end)
        if mark:
            self._at, self._pending = _At.ANSWER, ""
            return MessageDelta(answer, thoughts)
        final = len(self._pending) - unfinished(self._pending, (self.end,))
        thoughts, self._pending = self._pending[:final], self._pending[final:]
        return MessageDelta(reasoning=thoughts)

    def _rest(self) -> MessageDelta:
        text, self._pending = self._pending, ""
        return MessageDelta(text)


class OpenThinkingParser(ThinkingParser):
    """Parser for DeepSeek R1, whose answers always begin with reasoning, even without a mark in the prompt."""

    opens = True


class MistralThinkingParser(ThinkingParser):
    """Parser for Magistral, whose marks are special tokens."""

    keeps_special_tokens = True
    begin = "[THINK]"
    end = "[/THINK]"
