"""Base class of tool-call parsers. It passes on the answer's text around calls, and the arguments of calls, as they
arrive.
"""

from abc import abstractmethod

from wingbeat.deployments.parsing.formats.json_call import JsonCall, JsonValue, Progress
from wingbeat.deployments.parsing.message import MessageDelta, Parser, ToolCallDelta, new_call_id


class CallParser(Parser):
    """State machine that reads a text in pieces.

    `_advance` reads as much text as has a meaning that later text cannot change. White space after a call is left out
    of the answer; so is white space before a call if only calls follow.
    """

    keeps_special_tokens = True
    new_id = staticmethod(new_call_id)

    def __init__(self) -> None:
        self._pending = ""
        self._ended = False
        """Whether the text has ended. An incomplete mark at its end is then answer text."""
        self._out = MessageDelta()
        self._space = ""
        self._beside_call = False
        """Whether the last output was a call."""
        self._num_calls = 0
        self._call = JsonCall()
        self._raw = ""
        """Text that has been read as part of a call. If it turns out not to be a call, this text becomes answer
        text.
        """
        self._is_sent = False

    def push(self, text: str) -> MessageDelta:
        """See `Parser`."""
        self._pending += text
        while self._pending and self._advance():
            pass
        return self._take()

    def flush(self) -> MessageDelta:
        """Returns the rest of the message; if a call is unfinished and no part of the call was sent, the text of the
        call becomes answer text.
        """
        self._ended = True
        while self._pending and self._advance():
            pass
        if self._raw and not self._is_sent:
            self._drop_call()
        if self._space and not self._beside_call:
            self._out = self._out.plus(MessageDelta(self._space))
        return self._take()

    def cut(self) -> MessageDelta:
        """Ends a text that was cut off, see `Parser`. Unread text is dropped, because it may be the beginning of a
        mark. A call of which nothing was sent is dropped too.
        """
        if self._pending or (self._raw and not self._is_sent):
            self._pending = self._raw = self._space = ""
        return self.flush()

    @abstractmethod
    def _advance(self) -> bool:
        """Reads some of `_pending`; returns False if more text is needed first.

        Subclasses assign the method that reads the next part of the text.
        """

    def _take(self) -> MessageDelta:
        out, self._out = self._out, MessageDelta()
        return out

    def _read(self, length: int) -> str:
        """Removes and returns the next characters of `_pending`."""
        text, self._pending = self._pending[:length], self._pending[length:]
        return text

    def _say(self, text: str) -> None:
        """Adds text to the answer; white space at the end of `text` is held back until more text follows."""
        text = self._space + (text.lstrip() if self._beside_call else text)
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._beside_call = False
            self._out = self._out.plus(MessageDelta(said))

    def _read_answer(self) -> bool:
        """Reads all text as answer text."""
        self._say(self._read(len(self._pending)))
        return False

    def _begin_call(self, raw: str, needs_arguments: bool = False) -> None:
        """Starts reading a call's object; `raw` is the text read so far for the call."""
        self._call, self._raw, self._is_sent = JsonCall(needs_arguments), raw, False

    def _read_call(self) -> Progress:
        """Reads the available part of the call's object; if the object turns out not to be a call, it becomes answer
        text.
        """
        for position, char in enumerate(self._pending):
            progress = self._call.push(char)
            if progress is Progress.BAD and not self._is_sent:
                self._drop_call()
                self._pending = self._pending[position:]
                return progress
            if not self._is_sent:
                self._raw += char
            if progress is Progress.DONE or self._call.known:
                self._send_call()
            if progress is not Progress.OPEN:
                self._pending = self._pending[position + 1 :]
                return progress
        self._pending = ""
        return Progress.OPEN

    def _send_call(self) -> None:
        arguments = self._call.take_arguments()
        if not self._is_sent:
            self._is_sent, self._raw = True, ""
            self._send(arguments, self._call.name)
        elif arguments:
            self._send(arguments)

    def _send(self, arguments: str, name: str | None = None, own_id: str | None = None) -> None:
        """Sends arguments of the latest call. If `name` is given, a new call is begun first, with the id `own_id` or a
        random id.
        """
        if name is not None:
            self._beside_call = True
            self._num_calls += 1
        index, call_id = self._num_calls - 1, None if name is None else own_id or self.new_id()
        self._out = self._out.plus(MessageDelta(tool_calls=(ToolCallDelta(index, arguments, call_id, name),)))

    def _send_value(self, value: JsonValue) -> bool:
        """Sends the available part of a JSON value as arguments; returns whether the value is complete."""
        for position, char in enumerate(self._pending):
            value.take(char)
            if value.complete:
                self._send(self._read(position + 1))
                return True
        self._send(self._read(len(self._pending)))
        return False

    def _drop_call(self) -> None:
        raw, self._raw = self._raw, ""
        self._say(raw)
