"""Parsers of tool calls as a JSON list, `[{"name": "f", "arguments": {...}}, ...]`, and of one call's bare arguments.

If a model must call a tool and its call format is not known, a grammar makes the model write one of these forms.
"""

from wingbeat.deployments.parsing.formats.call_text import CallParser
from wingbeat.deployments.parsing.formats.json_call import SPACE, Progress
from wingbeat.deployments.parsing.message import MessageDelta, Parser, ToolCallDelta, new_call_id


class CallListParser(CallParser):
    """Parser of a JSON list of calls. Text that is not such a list, and text after the list, is answer text."""

    keeps_special_tokens = False

    def _read_start(self) -> bool:
        rest = self._pending.lstrip()
        if not rest:
            self._advance = self._read_answer if self._ended else self._read_start
            return self._ended
        is_list = rest.startswith("[")
        self._advance = self._read_between if is_list else self._read_answer
        self._raw, self._is_sent = self._read(len(self._pending) - len(rest) + is_list), False
        if not is_list:
            self._drop_call()
        return True

    _advance = _read_start

    def _read_between(self) -> bool:
        """Reads the characters between two objects."""
        rest = self._pending.lstrip(SPACE + ",")
        raw = self._raw + self._read(len(self._pending) - len(rest))
        if not rest:
            self._raw = raw
            return False
        if rest.startswith("{"):
            self._begin_call("" if self._num_calls else raw)
            self._advance = self._read_object
            return True
        self._raw = raw
        if rest.startswith("]"):
            self._raw += self._read(1)
        if self._num_calls:
            self._raw = ""
        else:
            self._drop_call()
        self._advance = self._read_answer
        return True

    def _read_object(self) -> bool:
        progress = self._read_call()
        if progress is Progress.DONE:
            self._advance = self._read_between
        elif progress is Progress.BAD:
            self._advance = self._read_answer
        return True


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
