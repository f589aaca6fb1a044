"""Parsers find equal calls and reasoning however a text is cut; the rest stays text."""

import itertools
import json
from random import Random

import pytest

from wingbeat.deployments.parsing.formats.call_list import CallListParser, OneCallParser
from wingbeat.deployments.parsing.formats.harmony import HarmonyParser
from wingbeat.deployments.parsing.formats.hermes import HermesParser
from wingbeat.deployments.parsing.formats.llama_json import LlamaJsonParser
from wingbeat.deployments.parsing.formats.mistral import MistralParser
from wingbeat.deployments.parsing.formats.thinking import MistralThinkingParser, OpenThinkingParser, ThinkingParser
from wingbeat.deployments.parsing.message import MessageDelta, PlainText, ReasoningThenCalls

ARGUMENTS = '{"city": "Paris \\"é\\" }] </tool_call> [TOOL_CALLS] {", "days": [1, {"a": null}], "x": -1.5e3}'


def counting(kind, *args):
    """A parser with consecutive call ids, so that two runs can be compared."""
    numbers = itertools.count()
    return type(kind.__name__, (kind,), {"new_id": lambda _: f"id{next(numbers)}"})(*args)


def call(name: str, key: str = "arguments", arguments: str = ARGUMENTS) -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes():
    return counting(HermesParser)


def llama():
    return counting(LlamaJsonParser)


def mistral():
    return counting(MistralParser)


def harmony():
    return counting(HarmonyParser)


def call_list():
    return counting(CallListParser)


def thinking(prompt=""):
    return ThinkingParser(prompt)


def thinking_then_hermes():
    return ReasoningThenCalls(OpenThinkingParser("<|assistant|>"), hermes())


TAGGED = f"<tool_call>\n{call('f')}\n</tool_call>"
HARMONY = (
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)
F = (("f", ARGUMENTS),)
G = ("g", "{}")

CASES = [
    (hermes, "Just text.", "Just text.", "", ()),
    (hermes, " a \n", " a \n", "", ()),
    (hermes, TAGGED, "", "", F),
    (hermes, f"I look.\n\n{TAGGED}", "I look.", "", F),
    (hermes, f"{TAGGED}\n<tool_call>{call('g', arguments='{}')}</tool_call>\n", "", "", (*F, G)),
    (hermes, f"a {TAGGED} b ", "a b ", "", F),
    (hermes, f"{TAGGED}{TAGGED}", "", "", F + F),
    (hermes, TAGGED.removesuffix("_call>"), "", "", F),
    (hermes, f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "f"}}</tool_call>', "", "", F),
    (hermes, '<tool_call>{"name": "g"}</tool_call>', "", "", (G,)),
    (hermes, '<tool_call>{"name": "g", "arguments": null}</tool_call>', "", "", (G,)),
    (hermes, '<tool_call>{"name": "g", "arguments": "{}"}</tool_call>', "", "", (G,)),
    (hermes, '<tool_call>{"id": 7, "x": [{"y": "}"}], "name": "g", "arguments": {}}</tool_call>', "", "", (G,)),
    (hermes, f"<tool_call>{call('f')} next", "next", "", F),
    (hermes, "<tool_call>oops</tool_call> x", "<tool_call>oops</tool_call> x", "", ()),
    (hermes, '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', "", ()),
    (hermes, "a <tool_call>", "a <tool_call>", "", ()),
    (hermes, "a < b <tool", "a < b <tool", "", ()),
    (hermes, '<tool_call>{"name": "f", "arguments": {"a": 1', "", "", (("f", '{"a": 1'),)),
    (hermes, '<tool_call>{"name": "f", "arguments": {"a": 1}! </tool_call> b', "b", "", (("f", '{"a": 1}'),)),
    (llama, "Hello {", "Hello {", "", ()),
    (llama, call("f", "parameters"), "", "", F),
    (llama, f"<|python_tag|>{call('f', 'parameters')}; {call('g', arguments='{}')}", "", "", (*F, G)),
    (llama, f'{{"type": "function", {call("f", "parameters")[1:]} ;', "", "", F),
    (llama, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', "", ()),
    (llama, '{"answer": [1, 2]} ', '{"answer": [1, 2]} ', "", ()),
    (llama, "<|python_tag|>print(1)", "<|python_tag|>print(1)", "", ()),
    (llama, "<|pyth", "<|pyth", "", ()),
    (mistral, "text [TOOL", "text [TOOL", "", ()),
    (mistral, f"[TOOL_CALLS][{call('f')}, {call('g', arguments='{}')}]", "", "", (*F, G)),
    (mistral, f"So: [TOOL_CALLS]f{ARGUMENTS}", "So:", "", F),
    (mistral, f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{{}}", "", "", (*F, G)),
    (mistral, "[TOOL_CALLS]f", "[TOOL_CALLS]f", "", ()),
    (harmony, "plain", "plain", "", ()),
    (harmony, HARMONY, "", "Let me see.", F),
    (
        harmony,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b <|return|>",
        "b ",
        "a",
        (),
    ),
    (harmony, f" to=functions.f<|channel|>commentary json<|message|>{ARGUMENTS}", "", "", F),
    (harmony, "<|channel|>final<|message|>a <|e", "a <|e", "", ()),
    (call_list, f"[{call('f', 'parameters')}, {call('g', arguments='{}')}]", "", "", (*F, G)),
    (call_list, "[]", "[]", "", ()),
    (call_list, " no", " no", "", ()),
    (call_list, "[1, 2]", "[1, 2]", "", ()),
    (lambda: counting(OneCallParser, "f"), f" {ARGUMENTS}", "", "", F),
    (thinking, "<think>a</think>b", "b", "a", ()),
    (thinking, "\n<think>a", "", "a", ()),
    (thinking, "no <think>a</think>", "no <think>a</think>", "", ()),
    (thinking, "<thi", "<thi", "", ()),
    (lambda: thinking("x<think>\n"), "a</think>b</think>", "b</think>", "a", ()),
    (lambda: thinking("<think>\n\n</think>\n\n"), "<think>b", "<think>b", "", ()),
    (lambda: OpenThinkingParser(""), "a</thin", "", "a</thin", ()),
    (lambda: OpenThinkingParser("<think></think>"), "a", "a", "", ()),
    (lambda: MistralThinkingParser(""), "[THINK]a[/THINK]b", "b", "a", ()),
    (thinking_then_hermes, f"a <tool_call> </think>\n\n{TAGGED}", "", "a <tool_call> ", F),
    (PlainText, "<think>", "<think>", "", ()),
]
IDS = [f"{index}-{case[1][:30]!a}" for index, case in enumerate(CASES)]


def found(delta: MessageDelta) -> tuple[str, str, tuple]:
    return delta.content, delta.reasoning, tuple((call.name, call.arguments) for call in delta.tool_calls)


@pytest.mark.parametrize(("new", "text", "content", "reasoning", "calls"), CASES, ids=IDS)
def test_a_whole_text_is_taken_apart(new, text, content, reasoning, calls):
    assert found(new().parse(text)) == (content, reasoning, calls)


@pytest.mark.few(6)
@pytest.mark.parametrize(("new", "text", "content", "reasoning", "calls"), CASES, ids=IDS)
def test_the_same_is_found_however_the_text_is_cut(new, text, content, reasoning, calls):
    whole, rng = new().parse(text), Random(5)
    cuts = [range(1, len(text)), *([i] for i in range(len(text)))]
    cuts += [sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 9))) for _ in range(30)]
    for cut in cuts:
        parser, got = new(), MessageDelta()
        for begin, end in itertools.pairwise([0, *cut, len(text)]):
            got = got.plus(parser.push(text[begin:end]))
        assert got.plus(parser.flush()) == whole


@pytest.mark.slow
def test_random_mixtures_of_marks_are_read_the_same_however_they_are_cut():
    rng = Random(11)
    pieces = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<think>",
        "</think>",
        "<|python_tag|>",
        "{",
        "}",
    ]
    pieces += [
        "<|message|>",
        "<|channel|>final",
        "<|start|>",
        "<|end|>",
        '"name": "f"',
        '"arguments": {',
        ",",
        " ",
        "[",
        "]",
    ]
    pieces += [call("f"), call("g", "parameters"), "a", "é", '"', "\\", "to=functions.h", ";", "\n", '"name"', ":", "1"]
    makers = (hermes, llama, mistral, harmony, call_list, thinking, thinking_then_hermes)
    for _ in range(600):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 12)))
        for new in makers:
            whole, parser, got = new().parse(text), new(), MessageDelta()
            cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 20)))
            for begin, end in itertools.pairwise([0, *cuts, len(text)]):
                got = got.plus(parser.push(text[begin:end]))
            assert got.plus(parser.flush()) == whole, (new.__name__, text, cuts)


def test_arguments_are_sent_as_they_come():
    parser, deltas = hermes(), []
    for char in TAGGED:
        deltas += parser.push(char).tool_calls
    assert (deltas[0].name, deltas[0].id, deltas[0].index) == ("f", "id0", 0)
    assert {(delta.name, delta.id) for delta in deltas[1:]} == {(None, None)}
    assert len(deltas) == len(ARGUMENTS)
    assert json.loads("".join(delta.arguments for delta in deltas))["days"] == [1, {"a": None}]


def test_text_of_the_answer_is_held_only_where_a_mark_may_begin():
    parser = hermes()
    assert [parser.push(text).content for text in ("one two", " <", "b", " <tool_cal", "m")] == [
        *("one two", "", " <b", "", " <tool_calm"),
    ]
