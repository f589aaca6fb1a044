"""Parser of tool calls of Mistral models. After a mark, the calls are written either as a list or one by one.

Older models: `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`. Newer models: `[TOOL_CALLS]f{...}`,
`[TOOL_CALLS]f[ARGS]{...}` or `[TOOL_CALLS]f[CALL_ID]abc[ARGS]{...}`.
"""

import secrets
import string
from collections.abc import Sequence

from wingbeat.deployments.parsing.call_format import (
    Format,
    Function,
    between,
    calls,
    in_order,
    json_of,
    list_of_calls,
    one_of,
    text,
)
from wingbeat.deployments.parsing.formats.call_list import CallListParser
from wingbeat.deployments.parsing.formats.call_text import CallParser
from wingbeat.deployments.parsing.formats.json_call import JsonValue
from wingbeat.deployments.parsing.message import MessageDelta, unfinished

MARK = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
_ID_CHARS = string.ascii_letters + string.digits


def new_mistral_id() -> str:
    """Returns a random id in the form that Mistral's chat templates require: nine letters and digits."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


class MistralParser(CallParser):
    """Parser of calls that may have text before them."""

    new_id = staticmethod(new_mistral_id)

    @classmethod
    def calls_format(cls, functions: Sequence[Function], several: bool) -> Format:
        """Returns the format of calls as a list or one by one; the model chooses between the two."""
        tags = [
            between(f"{MARK}{name}{mark}", json_of(schema), "")
            for name, schema in functions
            for mark in ("", ARGUMENTS)
        ]
        return one_of(in_order(text(MARK), list_of_calls(functions, several)), calls(tags, "", several))

    def __init__(self) -> None:
        super().__init__()
        self._list = CallListParser()
        self._list.new_id = self.new_id
        self._value = JsonValue()

    def flush(self) -> MessageDelta:
        """Returns the rest of the message."""
        rest = super().flush()
        return rest.plus(self._list.flush())

    def cut(self) -> MessageDelta:
        """See `Parser`."""
        listed = self._list.cut()
        return super().cut().plus(listed)

    def _read_text(self) -> bool:
        begin = self._pending.find(MARK)
        if begin >= 0:
            self._say(self._read(begin))
            self._raw, self._is_sent = self._read(len(MARK)), False
            self._advance = self._read_head
            return True
        held = 0 if self._ended else unfinished(self._pending, (MARK,))
        self._say(self._read(len(self._pending) - held))
        return False

    _advance = _read_text

    def _read_head(self) -> bool:
        """Reads the bracket that opens a list, or a function's name up to its arguments."""
        head = self._pending.lstrip()
        if head.startswith("[") and not self._num_calls:
            self._beside_call, self._raw, self._advance = True, "", self._read_list
            return True
        begin = head.find("{")
        if begin < 0:
            if self._ended:
                self._raw += self._read(len(self._pending))
            return False
        name = head[:begin].removesuffix(ARGUMENTS).partition(CALL_ID)[0].strip()
        self._read(len(self._pending) - len(head) + begin)
        self._raw, self._is_sent = "", True
        self._send("", name)
        self._value, self._advance = JsonValue(), self._read_arguments
        return True

    def _read_list(self) -> bool:
        self._out = self._out.plus(self._list.push(self._read(len(self._pending))))
        return False

    def _read_arguments(self) -> bool:
        if not self._send_value(self._value):
            return False
        self._advance = self._read_text
        return True
