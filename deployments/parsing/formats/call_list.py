"""Parsers of tool calls as a JSON list, `[{"name": "f", "arguments": {...}}, ...]`, and of one call's bare arguments.

If a model must call a tool and its call format is not known, a grammar makes the model write one of these forms.
"""

from enum import Enum, auto

from wingbeat.deployments.parsing.call_text import CallParser
from wingbeat.deployments.parsing.json_call import SPACE, Progress
from wingbeat.deployments.parsing.message import MessageDelta, Parser, ToolCallDelta, new_call_id


class _At(Enum):
    START = auto()
    BETWEEN = auto()
    CALL = auto()
    TEXT = auto()


class CallListParser(CallParser):
    """Parser of a JSON list of calls. Text that is not such a list, and text after the list, is answer text."""

    keeps_special_tokens = False
    _at = _At.START

    def _advance(self) -> bool:
        match self._at:
            case _At.START:
                return self._read_start()
            case _At.BETWEEN:
                return self._read_between()
            case _At.CALL:
                return self._read_object()
            case _At.TEXT:
                return self._read_text()

    def _read_start(self) -> bool:
        rest = self._pending.lstrip()
        if not rest:
            self._at = _At.TEXT if self._ended else _At.START
            return self._ended
        self._at = _At.BETWEEN if rest.startswith("[") else _At.TEXT
        self._raw, self._is_sent = self._read(len(self._pending) - len(rest) + (self._at is _At.BETWEEN)), False
        if self._at is _At.TEXT:
            self._drop_call()
        return True

    def _read_between(self) -> bool:
        """Reads the characters between two objects."""
        rest = self._pending.lstrip(SPACE + ",")
        raw = self._raw + self._read(len(self._pending) - len(rest))
        if not rest:
            self._raw = raw
            return False
        if rest.startswith("{"):
            self._begin_call("" if self._num_calls else raw)
            self._at = _At.CALL
            return True
        self._raw = raw
        if rest.startswith("]"):
            self._raw += self._read(1)
        if self._num_calls:
            self._raw = ""
        else:
            self._drop_call()
        self._at = _At.TEXT
        return True

    def _read_object(self) -> bool:
        progress = self._read_call()
        if progress is Progress.DONE:
            self._at = _At.BETWEEN
        elif progress is Progress.BAD:
            self._at = _At.TEXT
        return True

    def _read_text(self) -> bool:
        self._say(self._read(len(self._pending)))
        return False


class OneCallParser(Parser):
    """Parser for which the whole text is the arguments of one call of a function that is known beforehand."""

    new_id = staticmethod(new_call_id)

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> MessageDelta:
        """Returns new text as arguments."""
        text = text.lstrip() if self._name else text
        if not text:
            return MessageDelta()
        name, self._name = self._name, None
        return MessageDelta(tool_calls=(ToolCallDelta(0, text, self.new_id() if name else None, name),))

    def flush(self) -> MessageDelta:
        """Returns an empty delta, because `push` holds no text back."""
        return MessageDelta()
