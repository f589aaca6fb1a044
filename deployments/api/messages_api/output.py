"""Builds a message incrementally: its content blocks and the events of a stream."""

import json
from typing import Any

from wingbeat.deployments.api.answers.generation import Generation
from wingbeat.deployments.api.answers.responses import Totals
from wingbeat.deployments.api.errors import as_api_error
from wingbeat.deployments.api.messages_api.error_form import error_form
from wingbeat.deployments.api.parsed.answer import Piece
from wingbeat.deployments.api.parsed.typed_events import Event
from wingbeat.deployments.parsing.message import MessageDelta, ToolCallDelta
from wingbeat.runtime.scheduling.request import FinishReason

_FIELDS = {"text": "text", "thinking": "thinking"}


class MessageOutput:
    """A message whose reasoning, text and calls become content blocks in their order of arrival."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._blocks: list[dict[str, Any]] = []
        self._arguments: list[str] = []
        """For each block, the JSON of the tool's input so far; empty for blocks that are not calls."""
        self._is_open = False
        self._call_index = -1

    def begin(self) -> list[Event]:
        """Returns the event that starts an empty message; cached tokens are reported only at the end."""
        usage = {"input_tokens": self._generation.num_prompt_tokens, "output_tokens": 0}
        usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return [Event("message_start", {"message": self._message(None, None, usage)})]

    def add(self, found: MessageDelta) -> list[Event]:
        """Adds new reasoning, text and calls; returns their events."""
        events = []
        if found.reasoning:
            events += self._add_text("thinking", found.reasoning)
        if found.content:
            events += self._add_text("text", found.content)
        for call in found.tool_calls:
            events += self._add_call(call)
        return events

    def end(self, piece: Piece) -> list[Event]:
        """Ends the message; returns the events that end the last block and the message."""
        reason, sequence = self._stop_reason(piece)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [
            *self._close(),
            Event("message_delta", {"delta": delta, "usage": _usage(piece.totals)}),
            Event("message_stop", {}),
        ]

    def fail(self, error: Exception) -> list[Event]:
        """Returns the error event that ends the message."""
        return [Event("error", {"error": error_form(as_api_error(error))["error"]})]

    def message(self, piece: Piece) -> dict[str, Any]:
        """Returns the whole message after its last piece."""
        message = self._message(*self._stop_reason(piece), _usage(piece.totals))
        return {**message, "seed": self._generation.seed, "metrics": piece.totals.metrics()}

    def _message(self, reason: str | None, sequence: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._generation.response_id.replace("chatcmpl-", "msg_"),
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": [dict(block) for block in self._blocks],
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _stop_reason(self, piece: Piece) -> tuple[str, str | None]:
        if piece.finish_reason is FinishReason.LENGTH:
            return "max_tokens", None
        if isinstance(piece.stop, str):
            return "stop_sequence", piece.stop
        return ("tool_use" if self._call_index >= 0 else "end_turn"), None

    def _add_text(self, kind: str, text: str) -> list[Event]:
        """Adds new reasoning or text; returns its events."""
        events = []
        if not self._is_open or self._blocks[-1]["type"] != kind:
            events = self._open({"type": kind, _FIELDS[kind]: "", **({"signature": ""} if kind == "thinking" else {})})
        self._blocks[-1][_FIELDS[kind]] += text
        return [*events, self._delta({"type": f"{kind}_delta", _FIELDS[kind]: text})]

    def _add_call(self, call: ToolCallDelta) -> list[Event]:
        events = []
        if call.index != self._call_index:
            self._call_index = call.index
            events = self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            self._arguments[-1] += call.arguments
            events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def _open(self, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self._blocks.append(block)
        self._arguments.append("")
        self._is_open = True
        return [*events, Event("content_block_start", {"index": len(self._blocks) - 1, "content_block": dict(block)})]

    def _close(self) -> list[Event]:
        """Ends the block that is open, if any; returns the block's last event."""
        if not self._is_open:
            return []
        self._is_open = False
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = _object(self._arguments[-1])
        return [Event("content_block_stop", {"index": len(self._blocks) - 1})]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return Event("content_block_delta", {"index": len(self._blocks) - 1, "delta": delta})


def _object(arguments: str) -> dict[str, Any]:
    """Parses the input of a call; returns an empty object if the model's text was cut off or is not a JSON object."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(totals: Totals) -> dict[str, Any]:
    """Returns the usage in Anthropic's form, in which `input_tokens` does not include cached tokens."""
    usage = totals.usage()
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
