"""Parser of Llama 3's tool calls: the whole answer is a call, `{"name": "f", "parameters": {...}}`, or several calls
separated by `;`.
"""

from collections.abc import Sequence
from typing import Self

from wingbeat.deployments.parsing.call_format import Format, Function, calls, objects, one_of
from wingbeat.deployments.parsing.formats.call_text import CallParser
from wingbeat.deployments.parsing.formats.json_call import SPACE, Progress
from wingbeat.deployments.parsing.message import MessageDelta

TAG = "<|python_tag|>"


class LlamaJsonParser(CallParser):
    """Parser of calls; an answer that does not begin like a call is text."""

    @classmethod
    def calls_format(cls, functions: Sequence[Function], several: bool) -> Format:
        """Returns the format of calls without other text."""
        return calls(objects(functions, key="parameters"), "; ", several)

    @classmethod
    def text_format(cls, functions: Sequence[Function], several: bool) -> Format:
        """Returns the format of an answer that consists of calls, or of text that does not begin like a call."""
        return one_of(cls.calls_format(functions, several), {"type": "regex", "pattern": r"[^{<\s](.|\s)*"})

    def __init__(self) -> None:
        super().__init__()
        self._names: frozenset[str] = frozenset()

    def set_functions(self, functions: Sequence[Function]) -> Self:
        """See `Parser`."""
        self._names = frozenset(function.name for function in functions)
        return self

    def cut(self) -> MessageDelta:
        """Ends a text that was cut off, see `Parser`; an object that cannot become a call is answer text."""
        is_text = self._advance == self._read_object and not self._is_sent and not self._call.may_become(self._names)
        return self.flush() if is_text else super().cut()

    def _read_start(self) -> bool:
        """Reads text where a call may begin, which is at the start of the text and after another call."""
        separators = SPACE + ";" if self._num_calls else SPACE
        body = self._pending.lstrip(separators)
        if not self._ended and TAG.startswith(body):
            return False
        if self._ended and not body:
            self._say("" if self._num_calls else self._pending)
            self._pending = ""
            return False
        tag = TAG if body.startswith(TAG) else ""
        rest = body[len(tag) :].lstrip()
        if tag and not rest and not self._ended:
            return False
        if rest.startswith("{"):
            self._begin_call(self._read(len(self._pending) - len(rest)), needs_arguments=True)
            self._advance = self._read_object
        else:
            self._advance = self._read_answer
        return True

    _advance = _read_start

    def _read_object(self) -> bool:
        progress = self._read_call()
        if progress is Progress.DONE:
            self._advance = self._read_start
        elif progress is Progress.BAD:
            # After a call with malformed arguments, further calls cannot be recognised, so the rest counts as answer
            # text.
            self._advance = self._read_answer
        return True
