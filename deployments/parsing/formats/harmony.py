"""Parser of the harmony format of gpt-oss: each message has a channel, which shows whether the message is reasoning, a
call or an answer.

Reasoning and answer:
`<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>answer`. A call:
`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`. Prompts end in `<|start|>assistant`.
"""

import re
from collections.abc import Sequence
from enum import Enum, auto

from wingbeat.deployments.parsing.call_format import (
    Format,
    Function,
    any_text_until,
    in_order,
    json_of,
    one_of,
    optional,
    text,
)
from wingbeat.deployments.parsing.formats.call_text import CallParser
from wingbeat.deployments.parsing.message import MessageDelta, unfinished

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_END = re.compile("|".join(map(re.escape, ENDS)))
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

_THOUGHTS = optional(in_order(any_text_until("<|end|>", f"<|channel|>analysis{MESSAGE}"), text("<|start|>assistant")))


class _At(Enum):
    HEADER = auto()
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class HarmonyParser(CallParser):
    """Parser of reasoning, calls and answers; a text without the format's marks is an answer."""

    _at = _At.HEADER

    @classmethod
    def calls_format(cls, functions: Sequence[Function], several: bool) -> Format:
        """Returns the format of optional reasoning and one call.

        `several` is ignored, because the token at the end of a call ends the whole answer, so there is at most one
        call.
        """
        heads = [
            in_order(text(f"<|channel|>commentary to=functions.{name} <|constrain|>json{MESSAGE}"), json_of(schema))
            for name, schema in functions
        ]
        return in_order(_THOUGHTS, one_of(*heads))

    def thinking_format(self) -> Format:
        """Returns the format of optional reasoning and the header of the answer."""
        return in_order(_THOUGHTS, text(f"<|channel|>final{MESSAGE}"))

    def __init__(self) -> None:
        super().__init__()
        self._num_messages = 0

    def cut(self) -> MessageDelta:
        """Ends a text that was cut off, see `Parser`.

        If no message has begun, the text counts as the answer, unless the text may be the beginning of a header.
        """
        header = self._pending.lstrip()
        begins_header = "<|".startswith(header[:2]) or _RECIPIENT.search(header)
        is_text = self._at is _At.HEADER and not self._num_messages and not begins_header
        return self.flush() if is_text else super().cut()

    def _advance(self) -> bool:
        return self._read_header() if self._at is _At.HEADER else self._read_body()

    def _read_header(self) -> bool:
        header, mark, rest = self._pending.partition(MESSAGE)
        if not mark:
            if not self._ended:
                return False
            text = self._read(len(self._pending))
            if not self._num_messages:
                self._add(MessageDelta(text))
            return False
        self._pending = rest
        self._num_messages += 1
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient:
            self._at = _At.CALL
            self._send("", recipient[1].removeprefix("functions."))
        else:
            self._at = _At.REASONING if channel and channel[1] == "analysis" else _At.TEXT
        return True

    def _read_body(self) -> bool:
        end = _END.search(self._pending)
        held = 0 if end or self._ended else unfinished(self._pending, ENDS)
        text = self._read(end.start() if end else len(self._pending) - held)
        if self._at is _At.CALL:
            self._send(text)
        else:
            self._add(MessageDelta(text) if self._at is _At.TEXT else MessageDelta(reasoning=text))
        if end:
            self._read(len(end[0]))
            self._at = _At.HEADER
        return end is not None

    def _add(self, delta: MessageDelta) -> None:
        self._out = self._out.plus(delta)
