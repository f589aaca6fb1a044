"""Chat answers with the reasoning and tool calls that parsers found in their text."""

from typing import Any

from wingbeat.deployments.api.answers.generation import ChoiceDelta, Generation
from wingbeat.deployments.api.answers.responses import ChatShape
from wingbeat.deployments.parsing.message import MessageDelta, Parser, ToolCallDelta
from wingbeat.runtime.scheduling.request import FinishReason

TOOL_CALLS = "tool_calls"
THOUGHTS = ("reasoning", "reasoning_content")
"""Names under which a message carries its reasoning."""


class ParsedChatShape(ChatShape):
    """Form of `/v1/chat/completions` with parsers.

    Each answer needs a separate object, because the object holds the state of the parsers of the answer's choices.
    """

    def __init__(self, generation: Generation) -> None:
        self._new_parser = generation.new_parser
        self._parsers: dict[int, Parser] = {}
        self._with_calls: set[int] = set()

    def choice(self, last: ChoiceDelta, text: str) -> dict[str, Any]:
        """Returns a choice with its message, which has text, reasoning (under both names) and calls."""
        found = read_piece(self._new_parser(), last._replace(text=text))
        choice = super().choice(last, found.content)
        message = choice["message"]
        message |= dict.fromkeys(THOUGHTS, found.reasoning or None)
        if found.tool_calls:
            message["content"] = found.content or None
            message["tool_calls"] = [_call(call) for call in found.tool_calls]
            choice["finish_reason"] = _finish(last.finish_reason)
        return choice

    def chunk_choices(self, delta: ChoiceDelta, is_first: bool) -> list[dict[str, Any]]:
        """Returns choices with the role (in the first delta), reasoning, text, calls, and the finish reason with an
        empty delta.
        """
        found = self._read(delta)
        chunks = super().chunk_choices(delta._replace(text=found.content), is_first)
        if found.reasoning:
            fields = dict.fromkeys(THOUGHTS, found.reasoning)
            chunks.insert(1 if is_first else 0, self._chunk_choice(delta.index, fields, None))
        if found.tool_calls:
            self._with_calls.add(delta.index)
            chunk = self._chunk_choice(delta.index, {"tool_calls": [*map(_call_delta, found.tool_calls)]}, None)
            chunks.insert(len(chunks) - (delta.finish_reason is not None), chunk)
        if delta.finish_reason is not None and delta.index in self._with_calls:
            chunks[-1]["finish_reason"] = _finish(delta.finish_reason)
        return chunks

    def _read(self, delta: ChoiceDelta) -> MessageDelta:
        if delta.index not in self._parsers:
            self._parsers[delta.index] = self._new_parser()
        return read_piece(self._parsers[delta.index], delta)


def read_piece(parser: Parser, delta: ChoiceDelta) -> MessageDelta:
    """Parses a delta into text, reasoning and calls; with the last delta, text that the parser has held back so far is
    returned too.
    """
    found = parser.push(delta.text)
    return found if delta.finish_reason is None else found.plus(parser.cut() if delta.is_cut else parser.flush())


def _finish(finish_reason: FinishReason | None) -> str | None:
    """Returns the finish reason of a choice with calls: the original finish reason if the choice was cut off, else
    `tool_calls`.
    """
    return TOOL_CALLS if finish_reason is FinishReason.STOP else finish_reason


def _call(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_call(call)}
