"""Builds a response incrementally: its items and the typed events of a stream."""

import uuid
from itertools import count
from typing import Any

from wingbeat.deployments.api.answers.generation import Generation
from wingbeat.deployments.api.answers.responses import Totals
from wingbeat.deployments.api.errors import as_api_error
from wingbeat.deployments.api.parsed.answer import Piece
from wingbeat.deployments.api.parsed.typed_events import Event
from wingbeat.deployments.api.responses_api.body import ResponsesBody
from wingbeat.deployments.parsing.message import MessageDelta, ToolCallDelta
from wingbeat.runtime.scheduling.request import FinishReason


class ResponseOutput:
    """A response whose reasoning, text and calls become items in their order of arrival."""

    def __init__(self, generation: Generation, body: ResponsesBody) -> None:
        self._id = generation.response_id.replace("chatcmpl-", "resp_")
        self._generation = generation
        self._body = body
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        self._call_index = -1
        self._numbers = count()

    def begin(self) -> list[Event]:
        """Returns the events of the empty response."""
        begun = {"response": self.response("in_progress")}
        return self._numbered([Event(f"response.{name}", dict(begun)) for name in ("created", "in_progress")])

    def add(self, found: MessageDelta) -> list[Event]:
        """Adds new reasoning, text and calls; returns their events."""
        events = []
        if found.reasoning:
            events += self._add_text("reasoning", found.reasoning)
        if found.content:
            events += self._add_text("message", found.content)
        for call in found.tool_calls:
            events += self._add_call(call)
        return self._numbered(events)

    def end(self, piece: Piece) -> list[Event]:
        """Ends the response; returns the events that end the last item and the response."""
        status = "incomplete" if piece.finish_reason is FinishReason.LENGTH else "completed"
        events = self._close(status)
        if not self._items:
            events += [*self._add_text("message", ""), *self._close(status)]
        response = self.response(status, piece.totals, piece.reasoning_tokens)
        return self._numbered([*events, Event(f"response.{status}", {"response": response})])

    def fail(self, error: Exception) -> list[Event]:
        """Returns the error event that ends the response."""
        shown = as_api_error(error)
        failure = {"code": shown.code or "server_error", "message": shown.message}
        response = {**self.response("failed"), "error": failure}
        return self._numbered([Event("response.failed", {"response": response})])

    def response(self, status: str, totals: Totals | None = None, reasoning_tokens: int = 0) -> dict[str, Any]:
        """Returns the response object."""
        body = self._body
        ended = {} if totals is None else {"metrics": totals.metrics()}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._generation.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._generation.model,
            "output": [dict(item) for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if totals is None else _usage(totals, reasoning_tokens),
            "user": body.user,
            "metadata": body.metadata or {},
            "seed": self._generation.seed,
            **ended,
        }

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event.fields["sequence_number"] = next(self._numbers)
        return events

    def _add_text(self, kind: str, text: str) -> list[Event]:
        """Adds new reasoning or message text; returns its events."""
        events = []
        if not self._is_open or self._items[-1]["type"] != kind:
            events += self._close()
            is_message = kind == "message"
            item = {"id": _new_id("msg" if is_message else "rs"), "type": kind, "status": "in_progress", "content": []}
            item |= {"role": "assistant"} if is_message else {"summary": [], "encrypted_content": None}
            events.append(self._open(item))
            item["content"].append(_part(kind, ""))
            events.append(self._event("response.content_part.added", content_index=0, part=_part(kind, "")))
        self._items[-1]["content"][0]["text"] += text
        if text:
            extra = {"logprobs": []} if kind == "message" else {}
            events.append(self._event(f"response.{_NAMES[kind]}.delta", content_index=0, delta=text, **extra))
        return events

    def _add_call(self, call: ToolCallDelta) -> list[Event]:
        events = []
        if call.index != self._call_index:
            self._call_index = call.index
            events += self._close()
            item = {"id": _new_id("fc"), "type": "function_call", "status": "in_progress"}
            events.append(self._open({**item, "call_id": call.id, "name": call.name, "arguments": ""}))
        if call.arguments:
            self._items[-1]["arguments"] += call.arguments
            events.append(self._event("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def _open(self, item: dict[str, Any]) -> Event:
        self._items.append(item)
        self._is_open = True
        shown = {**item, "content": []} if "content" in item else dict(item)
        return Event("response.output_item.added", {"output_index": len(self._items) - 1, "item": shown})

    def _close(self, status: str = "completed") -> list[Event]:
        """Ends the item that is open, if any; returns the item's last events."""
        if not self._is_open:
            return []
        self._is_open, item = False, self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **fields)]
        else:
            kind, part = item["type"], item["content"][0]
            extra = {"logprobs": []} if kind == "message" else {}
            events = [
                self._event(f"response.{_NAMES[kind]}.done", content_index=0, text=part["text"], **extra),
                self._event("response.content_part.done", content_index=0, part=dict(part)),
            ]
        done = Event("response.output_item.done", {"output_index": len(self._items) - 1, "item": dict(item)})
        return [*events, done]

    def _event(self, event_type: str, /, **fields: Any) -> Event:
        """Returns an event that contains the index of the latest item."""
        return Event(event_type, {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **fields})


_NAMES = {"message": "output_text", "reasoning": "reasoning_text"}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _usage(totals: Totals, reasoning_tokens: int) -> dict[str, Any]:
    usage = totals.usage()
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }
