"""Requests that ten agents and libraries send for a turn, written by hand in their documented formats.

Fields that only their vendors' own services know stay in: an agent cannot be told to leave them out. Lengths are short,
so that the demo pair's context holds them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class AgentBody(NamedTuple):
    """A request of an agent."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str] = MappingProxyType({})


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
MODEL = "wingbeat-demo"
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "File to read."}},
    "required": ["path"],
    "additionalProperties": False,
}
CHAT_TOOL = {"type": "function", "function": {"name": "read_file", "description": "Read a file.", "parameters": SCHEMA}}
ASK = "Complete: def add(a, b):"

AGENT_BODIES = {
    "claude_code": AgentBody(
        MESSAGES,
        {
            "model": MODEL,
            "max_tokens": 32,
            "stream": True,
            "system": [{"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": ASK, "cache_control": {"type": "ephemeral", "ttl": "5m"}}],
                }
            ],
            "tools": [{"name": "Read", "description": "Read a file.", "input_schema": SCHEMA}],
            "metadata": {"user_id": "user_0f3a_account__session_7be1"},
            "thinking": {"type": "disabled"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "temperature": 1,
        },
        {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27"},
    ),
    "codex_cli": AgentBody(
        RESPONSES,
        {
            "model": MODEL,
            "instructions": "You are a coding agent.",
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]}],
            "tools": [
                {"type": "function", "name": "shell", "description": "Run.", "strict": False, "parameters": SCHEMA}
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199a0c1-7e52",
            "text": {"verbosity": "low"},
            "max_output_tokens": 32,
        },
        {"originator": "codex_cli_rs", "session_id": "0199a0c1-7e52"},
    ),
    "openai_agents_sdk": AgentBody(
        RESPONSES,
        {
            "model": MODEL,
            "instructions": "Answer briefly.",
            "input": [{"role": "user", "content": ASK}],
            "tools": [
                {"type": "function", "name": "read_file", "description": "", "strict": True, "parameters": SCHEMA}
            ],
            "include": [],
            "metadata": {"trace": "trace_1"},
            "parallel_tool_calls": True,
            "store": True,
            "truncation": "auto",
            "max_output_tokens": 32,
        },
    ),
    "langchain": AgentBody(
        CHAT,
        {
            "model": MODEL,
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}],
            "stream": False,
            "n": 1,
            "temperature": 0.7,
            "max_completion_tokens": 32,
            "tools": [CHAT_TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "service_tier": "auto",
            "metadata": {"run": "1"},
            "store": False,
        },
    ),
    "litellm": AgentBody(
        CHAT,
        {
            "model": MODEL,
            "messages": [
                {
                    "role": "system",
                    "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
                },
                {"role": "user", "content": ASK},
            ],
            "max_tokens": 32,
            "user": "team-7",
            "metadata": {"generation_name": "first"},
            "reasoning_effort": "low",
            "safety_identifier": "0c4f",
        },
    ),
    "cline": AgentBody(
        CHAT,
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "You are Cline."},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": ASK},
                        {"type": "text", "text": "<environment_details></environment_details>"},
                    ],
                },
            ],
            "temperature": 0,
            "max_tokens": 32,
            "reasoning_effort": "medium",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "aider": AgentBody(
        CHAT,
        {
            "model": MODEL,
            "messages": [
                {
                    "role": "system",
                    "content": [{"type": "text", "text": "Act as a coder.", "cache_control": {"type": "ephemeral"}}],
                },
                {"role": "user", "content": ASK},
                {"role": "assistant", "content": "Ok."},
                {"role": "user", "content": "Now do it."},
            ],
            "temperature": 0,
            "max_tokens": 32,
            "stream": True,
        },
    ),
    "continue": AgentBody(
        CHAT,
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": ASK}],
            "max_tokens": 32,
            "temperature": 0.2,
            "top_p": 0.95,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "stop": ["```"],
            "tools": [CHAT_TOOL],
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low"},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "opencode": AgentBody(
        CHAT,
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "You are opencode."},
                {"role": "user", "content": "Read a.py."},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "read_file", "arguments": '{"path": "a.py"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "x = 1"},
            ],
            "max_tokens": 32,
            "tools": [CHAT_TOOL],
            "tool_choice": "auto",
            "prompt_cache_key": "ses_4f",
            "reasoning_effort": "medium",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "llm": AgentBody(
        CHAT,
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": ASK}],
            "max_tokens": 32,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
}
