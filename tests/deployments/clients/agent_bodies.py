"""Requests of agents, written by hand in the formats of the agents' and their libraries' documents."""

from typing import Any, NamedTuple

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
EPHEMERAL = {"type": "ephemeral"}
PATH_SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Which city."}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Weather of a city.", "parameters": PATH_SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
STRICT_TOOL = {"type": "function", "function": {**FUNCTION, "strict": True}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
QUESTION = "How is the weather in Paris?"


class Agent(NamedTuple):
    """A request of an agent."""

    name: str
    path: str
    body: dict[str, Any]
    ignored: str | None = None
    """Ignored fields, as the answer's header lists them."""
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed


def parts(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, **more}]


CLAUDE_CODE = Agent(
    "Claude Code",
    f"{MESSAGES}?beta=true",
    {
        "model": "demo",
        "max_tokens": 256,
        "stream": True,
        "temperature": 1,
        "system": [*parts("You are an agent for code.", cache_control=EPHEMERAL), *parts("Be brief.")],
        "messages": [
            {"role": "user", "content": [*parts("<system-reminder>today</system-reminder>"), *parts(QUESTION)]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I should look.", "signature": "EqQB"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": parts("no network"),
                        "is_error": True,
                        "cache_control": {**EPHEMERAL, "ttl": "1h"},
                    }
                ],
            },
        ],
        "tools": [
            {"name": "weather", "description": "Weather.", "input_schema": PATH_SCHEMA, "eager_input_streaming": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"name": "now", "description": "The time.", "input_schema": {"type": "object"}, "cache_control": EPHEMERAL},
        ],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    },
    "context_management, tools[1] (web_search_20250305)",
    {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
        "x-app": "cli",
    },
)
CODEX = Agent(
    "Codex CLI",
    RESPONSES,
    {
        "model": "demo",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"},
            {
                "type": "function_call",
                "id": "fc_1",
                "status": "completed",
                "name": "weather",
                "arguments": '{"city": "Paris"}',
                "call_id": "call_1",
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        ],
        "tools": [
            {"type": "function", **FUNCTION, "strict": False},
            {"type": "custom", "name": "apply_patch", "description": "Edit.", "format": {"type": "grammar"}},
            {"type": "web_search", "external_web_access": False},
            {"type": "local_shell"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "service_tier": "priority",
        "prompt_cache_key": "0199-conversation",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "1"},
    },
    "text.verbosity, tools[1] (custom), tools[2] (web_search), tools[3] (local_shell)",
    {"originator": "codex_cli_rs", "session_id": "0199", "accept": "text/event-stream"},
)
OPENAI_AGENTS = Agent(
    "OpenAI Agents SDK",
    RESPONSES,
    {
        "model": "demo",
        "instructions": "You help.",
        "input": [
            {"role": "user", "content": QUESTION},
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
            },
            {"role": "user", "content": "Well?"},
        ],
        "include": ["web_search_call.action.sources"],
        "tools": [{"type": "function", **FUNCTION, "strict": True}, {"type": "file_search", "vector_store_ids": ["a"]}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "truncation": "auto",
        "store": True,
        "metadata": {"trace_id": "t"},
        "reasoning": {"effort": "low", "summary": "concise"},
    },
    "truncation, include[0] (web_search_call.action.sources), tools[1] (file_search)",
)
OPENAI_AGENTS_CHAT = Agent(
    "OpenAI Agents SDK, chat",
    CHAT,
    {
        "model": "demo",
        "messages": [{"role": "system", "content": "You help."}, {"role": "user", "content": QUESTION}],
        "tools": [STRICT_TOOL],
        "stream": True,
        "stream_options": {"include_usage": True},
        "store": True,
        "reasoning_effort": "low",
        "verbosity": "low",
        "metadata": {"a": "b"},
    },
    "verbosity",
)
LANGCHAIN = Agent(
    "LangChain",
    CHAT,
    {
        "model": "demo",
        "messages": [
            {"role": "user", "content": parts(QUESTION), "name": "human", "id": "m1"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny", "name": "weather"},
        ],
        "tools": [TOOL],
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "service_tier": "flex",
        "extra_headers": {"x": "y"},
    },
    "extra_headers, reasoning",
)
LITELLM = Agent(
    "LiteLLM",
    CHAT,
    {
        "model": "demo",
        "messages": [
            {"role": "system", "content": parts("You help.", cache_control=EPHEMERAL)},
            {"role": "user", "content": QUESTION},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{**CALL, "provider_specific_fields": None, "index": 0}],
                "reasoning_content": "hm",
                "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
                "provider_specific_fields": {"refusal": None},
                "function_call": None,
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny", "cache_control": EPHEMERAL},
        ],
        "tools": [{**TOOL, "cache_control": EPHEMERAL}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "session_id": "s",
        "request_id": "r",
        "user": "u",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "messages[2].provider_specific_fields, messages[2].thinking_blocks",
)
CLINE = Agent(
    "Cline",
    CHAT,
    {
        "model": "demo",
        "temperature": 0,
        "messages": [
            {"role": "system", "content": "You are Cline."},
            {"role": "user", "content": [*parts(f"<task>{QUESTION}</task>"), *parts("<environment_details/>")]},
        ],
        "tools": [TOOL],
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning": {"max_tokens": 1024},
        "provider": {"sort": "price"},
    },
    "provider, reasoning",
)
AIDER = Agent(
    "Aider",
    CHAT,
    {
        "model": "demo",
        "messages": [
            {"role": "system", "content": parts("Answer by edits.", cache_control=EPHEMERAL)},
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "Ok."},
            {"role": "user", "content": parts("Do it.", cache_control=EPHEMERAL)},
        ],
        "temperature": 0,
        "stream": True,
        "think": False,
        "num_ctx": 8192,
    },
    "num_ctx, think",
)
CONTINUE = Agent(
    "Continue",
    CHAT,
    {
        "model": "demo",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 256,
        "stream": True,
        "stream_options": {"include_usage": True},
        "prediction": {"type": "content", "content": "sunny"},
        "tools": [TOOL],
        "parallel_tool_calls": False,
        "keepAlive": 1800,
    },
    "keepAlive",
)
OPENCODE = Agent(
    "OpenCode",
    CHAT,
    {
        "model": "demo",
        "max_tokens": 256,
        "temperature": 0.55,
        "top_p": 1,
        "messages": [
            {"role": "system", "content": "You are OpenCode."},
            {"role": "user", "content": parts(QUESTION)},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoningSummary": "auto",
        "textVerbosity": "low",
        "promptCacheKey": "ses_1",
    },
    "promptCacheKey, reasoningSummary, textVerbosity",
)
LLM = Agent(
    "llm",
    CHAT,
    {
        "model": "demo",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts(QUESTION)}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "tools": [TOOL],
    },
)
AGENTS = (
    *(CLAUDE_CODE, CODEX, OPENAI_AGENTS, OPENAI_AGENTS_CHAT, LANGCHAIN, LITELLM),
    *(CLINE, AIDER, CONTINUE, OPENCODE, LLM),
)
