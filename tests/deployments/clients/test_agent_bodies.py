"""Requests of agents are answered, whole and streamed, and unserved fields are named."""

import re

import pytest

from tests.deployments.clients.agent_bodies import AGENTS, CLAUDE_CODE, CODEX, LITELLM, MESSAGES, OPENCODE, Agent
from tests.deployments.http_world import call
from tests.deployments.tool_world import CALL, PARSERS, TOKENIZER, ToolPool
from wingbeat.deployments.api.bodies.unserved_fields import HEADER
from wingbeat.deployments.api.parsed.reading import ChatParsers

TEXT = f"<think>Let me see.</think>I look. {CALL}"


def send(agent: Agent, pool: ToolPool, parsers: ChatParsers = PARSERS, **fields):
    headers = {**agent.headers, "Authorization": "Bearer x"}
    return call(pool, agent.path, {**agent.body, **fields}, headers=headers, tokenizer=TOKENIZER, parsers=parsers)


@pytest.mark.few(8)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agents_request_is_answered_and_what_was_ignored_is_named(agent, stream):
    fields = {"stream": stream} if stream else {"stream": False, "stream_options": None}
    if agent.path.startswith(MESSAGES):
        fields.pop("stream_options", None)
    answer = send(agent, ToolPool(TEXT), **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(HEADER) == agent.ignored
    assert answer.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    has_call = re.search(r'"(tool_calls|tool_use|function_call)"', answer.text) is not None
    assert has_call == ("tools" in agent.body)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_a_server_without_parsers_answers_in_text(agent):
    assert send(agent, ToolPool("It is sunny."), ChatParsers()).status_code == 200


@pytest.mark.parametrize(
    ("agent", "end"),
    [
        (CLAUDE_CODE, "<|tool|>[toolu_1]no network<|end|><|assistant|>high<think>"),
        (CODEX, "<|tool|>[call_1]sunny<|end|><|assistant|>medium"),
        (LITELLM, "<|tool|>[call_1]sunny<|end|><|assistant|><think>"),
        (OPENCODE, "<|tool|>[call_1]sunny<|end|><|assistant|>"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_happened_before_reaches_the_model(agent, end):
    pool = ToolPool("x")
    assert send(agent, pool).status_code == 200
    assert '"name": "weather"' in pool.prompt()
    assert "web_search" not in pool.prompt()
    assert "cache_control" not in pool.prompt()
    assert pool.prompt().endswith(end)
