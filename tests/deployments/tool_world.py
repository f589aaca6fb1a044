"""A scripted model with tools: a chat template in Hermes' format, and answers with calls and reasoning."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import httpx

from tests.deployments.http_world import FakePool, byte_tokenizer, call
from tests.deployments.scripted_tokens import Script
from wingbeat.deployments.api.completions import ChatReader
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.parts import first_result
from wingbeat.runtime.scheduling.request import FinishReason, Request

TEMPLATE = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif -%}
{%- for m in messages -%}
<|{{ m.role }}|>{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif -%}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{- m.content -}}
{%- for c in m.tool_calls or [] -%}
<tool_call>{"name": "{{ c.function.name }}", "city": "{{ c.function.arguments.city }}"}</tool_call>
{%- endfor -%}
{%- if not loop.last or not continue_final_message %}<|end|>{% endif -%}
{%- endfor -%}
{%- for d in documents or [] %}({{ d.text }}){% endfor -%}
{%- if add_generation_prompt %}<|assistant|>{{ reasoning_effort or "" }}{% if enable_thinking %}<think>{% endif %}
{%- endif -%}
"""
TOKENIZER = byte_tokenizer(TEMPLATE)


def named_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> ChatReader | None:
    """Parsers of these names; None where parsing is deleted."""
    return first_result("chat_reader", SimpleNamespace(**locals()), TEMPLATE)


PARSERS = named_parsers("hermes", "qwen3")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
USER = {"role": "user", "content": "hi"}
ASSISTANT = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}],
}
TOOL = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}


class Verbatim(Script):
    """A script that ignores the answer's grammar."""

    def tokens(self, request: Request, wanted: Sequence[int]) -> tuple[list[int], FinishReason]:
        return super().tokens(replace(request, params=replace(request.params, grammar=None)), wanted)


class ToolPool(FakePool):
    """A scripted pool with room for tools."""

    def __init__(self, answer: Callable[[Request], str] | str = CALL, tokens_per_output: int = 3) -> None:
        super().__init__(answer, tokens_per_output)
        self.info = ModelInfo("demo", max_model_len=8192, vocab_size=257, eos_token_ids=(0,), drafter="fake")
        self.script = Verbatim(TOKENIZER)

    def prompt(self) -> str:
        """The text of the latest request's prompt."""
        return TOKENIZER.decode(self.requests[-1].prompt_token_ids)


def post(pool: FakePool, path: str, body: dict, headers: dict | None = None, parsers: ChatReader | None = PARSERS):
    return call(pool, path, body, headers=headers, tokenizer=TOKENIZER, parsers=parsers)


def chat(pool: FakePool, parsers: ChatReader | None = PARSERS, **fields) -> httpx.Response:
    return post(pool, "/v1/chat/completions", {"messages": [USER], **fields}, parsers=parsers)


def events(response: httpx.Response) -> list[tuple[str, dict]]:
    """Named server-sent events with their data."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in response.text.split("\n\n") if block]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]
