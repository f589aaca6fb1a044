"""Parser of tool calls of Hermes and Qwen models: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from collections.abc import Sequence

from wingbeat.deployments.parsing.call_format import Format, Function, calls, objects, text_with_calls
from wingbeat.deployments.parsing.formats.call_text import CallParser
from wingbeat.deployments.parsing.formats.json_call import Progress
from wingbeat.deployments.parsing.message import unfinished

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesParser(CallParser):
    """Parser of one or several calls, which may have text around them."""

    @classmethod
    def calls_format(cls, functions: Sequence[Function], several: bool) -> Format:
        """Returns the format of calls without other text."""
        return calls(cls._tags(functions), "\n", several)

    @classmethod
    def text_format(cls, functions: Sequence[Function], several: bool) -> Format:
        """Returns the format of text that may contain calls."""
        return text_with_calls(cls._tags(functions), BEGIN, several)

    @staticmethod
    def _tags(functions: Sequence[Function]) -> list[Format]:
        return objects(functions, f"{BEGIN}\n", f"\n{END}")

    def _read_text(self) -> bool:
        begin = self._pending.find(BEGIN)
        if begin >= 0:
            self._say(self._read(begin))
            self._begin_call(self._read(len(BEGIN)))
            self._advance = self._read_object
            return True
        held = 0 if self._ended else unfinished(self._pending, (BEGIN,))
        self._say(self._read(len(self._pending) - held))
        return False

    _advance = _read_text

    def _read_object(self) -> bool:
        progress = self._read_call()
        if progress is Progress.DONE:
            self._advance = self._read_end
        elif progress is Progress.BAD:
            self._advance = self._skip if self._is_sent else self._read_text
        return True

    def _read_end(self) -> bool:
        """Reads the closing mark, which models sometimes omit."""
        self._pending = self._pending.lstrip()
        if not self._ended and END.startswith(self._pending):
            if self._pending == END:
                self._read(len(END))
                self._advance = self._read_text
            return False
        if self._pending.startswith(END) or END.startswith(self._pending):
            # If the answer was cut off within the closing mark, the beginning of the mark is read like the whole mark.
            self._read(len(END))
        self._advance = self._read_text
        return True

    def _skip(self) -> bool:
        """Drops the rest of a broken call up to its closing mark, because the rest is neither valid JSON nor answer
        text.
        """
        end = self._pending.find(END)
        if end >= 0:
            self._read(end + len(END))
            self._advance = self._read_text
            return True
        self._read(len(self._pending) - unfinished(self._pending, (END,)))
        return False
