"""What parsers of tool calls share: the answer around the calls, and calls that are sent as they come."""

from abc import abstractmethod

from wingbeat.deployments.parsing.json_call import JsonCall, JsonValue, Progress
from wingbeat.deployments.parsing.message import MessageDelta, Parser, ToolCallDelta, new_call_id


class CallParser(Parser):
    """A machine over the text that is not read yet: `_advance` reads some of it, as far as it is certain.

    Space behind calls, and before calls that end the text, is left out of the answer.
    """

    keeps_special_tokens = True
    new_id = staticmethod(new_call_id)

    def __init__(self) -> None:
        self._pending = ""
        self._ended = False
        """No more text comes: what may be the beginning of a mark is none."""
        self._out = MessageDelta()
        self._space = ""
        self._beside_call = False
        """Whether a call was the last thing that was said."""
        self._num_calls = 0
        self._call = JsonCall()
        self._raw = ""
        """What was read of a call that may turn out to be none."""
        self._is_sent = False

    def push(self, text: str) -> MessageDelta:
        """What is final after this text."""
        self._pending += text
        while self._pending and self._advance():
            pass
        return self._take()

    def flush(self) -> MessageDelta:
        """The rest: an unfinished call that could not be sent is text."""
        self._ended = True
        while self._pending and self._advance():
            pass
        if self._raw and not self._is_sent:
            self._drop_call()
        if self._space and not self._beside_call:
            self._out = self._out.plus(MessageDelta(self._space))
        return self._take()

    def cut(self) -> MessageDelta:
        """See `Parser`. What is not read yet may begin a mark, and what was read of a call may become one."""
        if self._pending or (self._raw and not self._is_sent):
            self._pending = self._raw = self._space = ""
        return self.flush()

    @abstractmethod
    def _advance(self) -> bool:
        """Read some of `_pending`; False where more text is needed first."""

    def _take(self) -> MessageDelta:
        out, self._out = self._out, MessageDelta()
        return out

    def _read(self, length: int) -> str:
        """The next characters of what is not read yet."""
        text, self._pending = self._pending[:length], self._pending[length:]
        return text

    def _say(self, text: str) -> None:
        """Text of the answer; space at its end waits for what follows."""
        text = self._space + (text.lstrip() if self._beside_call else text)
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._beside_call = False
            self._out = self._out.plus(MessageDelta(said))

    def _begin_call(self, raw: str, needs_arguments: bool = False) -> None:
        """A call's object comes next; `raw` is what was read for it."""
        self._call, self._raw, self._is_sent = JsonCall(needs_arguments), raw, False

    def _read_call(self) -> Progress:
        """Read the call's object as far as it is there; one that turns out to be none is said as text."""
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
        """Arguments of the latest call; with a name they begin the next one, under its own id where it has one."""
        if name is not None:
            self._beside_call = True
            self._num_calls += 1
        index, call_id = self._num_calls - 1, None if name is None else own_id or self.new_id()
        self._out = self._out.plus(MessageDelta(tool_calls=(ToolCallDelta(index, arguments, call_id, name),)))

    def _send_value(self, value: JsonValue) -> bool:
        """Send what is there of a JSON value that is a call's arguments; whether it is complete."""
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
