"""A call that a limit or a stop string cuts leaves nothing of its marks in the text, wherever the cut is."""

import itertools
from random import Random

import pytest

from tests.deployments.parsing.test_model_formats import (
    FUNCTIONS,
    deepseek,
    glm_call,
    kimi_call,
    kimi_section,
    qwen_call,
    v3_call,
    v31_call,
)
from tests.deployments.tool_world import CALL, WEATHER, ToolPool, chat, post
from wingbeat.deployments.parsing.call_format import Function
from wingbeat.deployments.parsing.formats.call_list import CallListParser
from wingbeat.deployments.parsing.formats.llama_json import LlamaJsonParser
from wingbeat.deployments.parsing.message import MessageDelta, Parser
from wingbeat.deployments.parsing.names import REASONING_PARSERS, TOOL_CALL_PARSERS, load_parser

SAID = "I look."
JSON_CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
HERMES = f"{SAID}\n\n<tool_call>\n{JSON_CALL}\n</tool_call>"
HARMONY = f"<|channel|>commentary<|message|>{SAID}<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
HARMONY += '<|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
TEXTS: dict[str, tuple[str, ...]] = {
    "hermes": (HERMES, f"{HERMES}\n<tool_call>\n{JSON_CALL}\n</tool_call>"),
    "llama3_json": (JSON_CALL, f"<|python_tag|>{JSON_CALL}; {JSON_CALL}", '{"type": "function", ' + JSON_CALL[1:]),
    "mistral": (f"{SAID}[TOOL_CALLS][{JSON_CALL}]", f'{SAID}[TOOL_CALLS]weather[ARGS]{{"city": "Oslo"}}'),
    "harmony": (HARMONY,),
    "pythonic": ('[weather(city="Oslo"), now()]', f'{SAID}<function_calls>\nweather(city="Oslo")\n</function_calls>'),
    "deepseek_v3": (SAID + deepseek(v3_call(), v3_call()),),
    "deepseek_v31": (SAID + deepseek(v31_call(), v31_call()),),
    "qwen3_coder": (f"{SAID}\n{qwen_call(city='Oslo', days='3')}\n{qwen_call('now')}",),
    "glm45": (f"{SAID}\n{glm_call(city='Oslo', days='3')}",),
    "kimi_k2": (SAID + kimi_section(kimi_call(), kimi_call(number=1)),),
}
"""Answers that end in calls, by a name of each format."""
CASES = [(name, text) for name, texts in TEXTS.items() for text in texts]


def read(parser: Parser, text: str, cuts: list[int]) -> tuple[str, str, list[tuple[str | None, str]]]:
    """Content, thoughts and calls of a cut text."""
    got = MessageDelta()
    for begin, end in itertools.pairwise([0, *cuts, len(text)]):
        got = got.plus(parser.push(text[begin:end]))
    got = got.plus(parser.cut())
    return got.content, got.reasoning, [(call.name, call.arguments) for call in got.tool_calls]


def test_every_format_has_a_text():
    assert {TOOL_CALL_PARSERS[name] for name in TEXTS} == set(TOOL_CALL_PARSERS.values())


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "text"), CASES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CASES)])
def test_a_cut_anywhere_leaves_no_marks_and_is_read_the_same_in_pieces(name, text):
    kind, rng = load_parser(name, TOOL_CALL_PARSERS, "tool_call_parser"), Random(3)
    num_calls = 0
    for length in range(len(text) + 1):
        part = text[:length]
        content, reasoning, calls = read(kind().set_functions(FUNCTIONS), part, [])
        assert SAID.startswith(content.rstrip()), part
        assert content.rstrip() == SAID or SAID not in part
        assert reasoning == ""
        assert len(calls) >= num_calls, part
        num_calls = len(calls)
        for cuts in (list(range(1, length)), sorted(rng.choices(range(length + 1), k=3))):
            assert read(kind().set_functions(FUNCTIONS), part, cuts) == (content, reasoning, calls), (part, cuts)
    assert num_calls > 0


@pytest.mark.parametrize("name", sorted(REASONING_PARSERS))
def test_thoughts_that_are_cut_leave_no_marks(name):
    text = "[THINK]hm, so[/THINK]" if name == "mistral" else "<think>hm, so</think>"
    if "harmony" in REASONING_PARSERS[name]:
        text = "<|channel|>analysis<|message|>hm, so<|end|>"
    kind = load_parser(name, REASONING_PARSERS, "reasoning_parser")
    for length in range(len(text) + 1):
        parser = kind() if "harmony" in REASONING_PARSERS[name] else kind("")
        content, reasoning, _ = read(parser, text[:length], [])
        assert content == ""
        assert "hm, so".startswith(reasoning)


def test_a_list_of_forced_calls_that_is_cut_is_no_text():
    for length in range(1, len(JSON_CALL) + 1):
        content, _, calls = read(CallListParser(), f"[{JSON_CALL}"[: length + 1], [])
        assert content == ""
    assert calls == [("weather", '{"city": "Oslo"}')]


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": [1, 2',
        '{"answ',
        '{"name": "Bob", "age": 3',
        '{"name": "Bo',
        '{"type": "cat", "colour": "r',
        "Just text",
        "Use `<tool>",
    ],
)
def test_an_answer_in_json_that_is_no_call_stays(text):
    assert read(LlamaJsonParser().set_functions([Function("weather", {})]), text, [])[0] == text


def test_plain_text_under_harmony_stays():
    assert read(load_parser("harmony", TOOL_CALL_PARSERS, "tool_call_parser")(), "Plain text", [])[0] == "Plain text"


@pytest.mark.few(4)
@pytest.mark.parametrize("max_tokens", [12, 17, 25, 33])
@pytest.mark.parametrize("path", ["chat", "stream", "/v1/messages", "/v1/responses"])
def test_no_endpoint_hands_out_marks_of_a_call_that_is_cut(path, max_tokens):
    pool = ToolPool(f"So.\n{CALL}")
    if path in ("chat", "stream"):
        answer = chat(pool, tools=[WEATHER], max_tokens=max_tokens, stream=path == "stream")
    elif path == "/v1/messages":
        tool = {"name": "weather", "input_schema": {}}
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "max_tokens": max_tokens}
        answer = post(pool, path, body)
    else:
        tool = {"type": "function", "name": "weather", "parameters": {}}
        answer = post(pool, path, {"input": "hi", "tools": [tool], "max_output_tokens": max_tokens})
    assert answer.status_code == 200
    assert "So." in answer.text
    assert "tool_call>" not in answer.text
    assert "<" not in answer.text


def test_a_stop_string_cuts_a_call_too():
    answer = chat(ToolPool(f"So.\n{CALL}"), tools=[WEATHER], stop=["weather"]).json()["choices"][0]
    assert (answer["message"]["content"], answer["stop_reason"]) == ("So.", "weather")


def test_an_answer_that_the_model_ended_keeps_what_is_no_call():
    answer = chat(ToolPool("Write a < b or <tool"), tools=[WEATHER]).json()["choices"][0]
    assert answer["message"]["content"] == "Write a < b or <tool"
