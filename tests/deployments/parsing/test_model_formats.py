"""Calls in the formats of model families: found, given types, streamed, and the same however the text is cut."""

import itertools
import json
from collections.abc import Callable
from random import Random

import pytest

from tests.deployments.parsing.test_parsers import counting
from wingbeat.deployments.parsing.call_format import Function
from wingbeat.deployments.parsing.formats.deepseek import (
    CALL,
    CALL_END,
    SECTION,
    SEPARATOR,
    DeepSeekV3Parser,
    DeepSeekV31Parser,
)
from wingbeat.deployments.parsing.formats.marked_json import KimiK2Parser
from wingbeat.deployments.parsing.formats.pythonic import PythonicParser
from wingbeat.deployments.parsing.formats.tagged_text import Glm45Parser, Qwen3CoderParser
from wingbeat.deployments.parsing.message import MessageDelta, Parser

FUNCTIONS = [
    Function(
        "weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": ["boolean", "null"]},
                "where": {"$ref": "#/$defs/place"},
                "either": {"anyOf": [{"type": "number"}, {"type": "string"}]},
            },
            "$defs": {"place": {"type": "array", "items": {"type": "number"}}},
        },
    ),
    Function("now", {"type": "object", "properties": {}}),
]
ARGUMENTS = '{"city": "Oslo \\"é\\" }] </tool_call> 😀", "days": 3, "where": [59.9, {"a": null}]}'
CITY = {"city": "Oslo"}


def known(kind: type[Parser]) -> Callable[[], Parser]:
    def new() -> Parser:
        return counting(kind).set_functions(FUNCTIONS)

    new.__name__ = kind.__name__
    return new


v31, v3, kimi = known(DeepSeekV31Parser), known(DeepSeekV3Parser), known(KimiK2Parser)
pythonic, qwen, glm = known(PythonicParser), known(Qwen3CoderParser), known(Glm45Parser)


def v31_call(name="weather", arguments=ARGUMENTS) -> str:
    return f"{CALL}{name}{SEPARATOR}{arguments}{CALL_END}"


def v3_call(name="weather", arguments=ARGUMENTS) -> str:
    return f"{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def kimi_call(name="weather", arguments=ARGUMENTS, number=0) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def deepseek(*calls: str, between: str = "") -> str:
    return SECTION[0] + between.join(calls) + SECTION[1]


def kimi_section(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def qwen_call(name="weather", **arguments: str) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def glm_call(name="weather", **arguments: str) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


FULL = json.loads(ARGUMENTS)
TYPED = {"city": "Oslo", "days": 3, "exact": True, "where": [1, 2.5], "either": 4}
TEXTS = {"city": "Oslo", "days": "3", "exact": "True", "where": "[1, 2.5]", "either": "4"}
FILE = "if a < b:\n    print('</tool_call>')\n\n"

CASES = [
    # Text alone, and what only looks like a call.
    *((new, "Just text. [1] < 2 ", "Just text. [1] < 2 ", []) for new in (v31, v3, kimi, pythonic, qwen, glm)),
    (v31, f"a {SECTION[0][:7]}", f"a {SECTION[0][:7]}", []),
    (v31, deepseek(), deepseek(), []),
    (v31, f"{SECTION[0]}oops", f"{SECTION[0]}oops", []),
    (v31, deepseek(v31_call(arguments="[1]")), deepseek(v31_call(arguments="[1]")), []),
    (v31, f"{CALL}{'x' * 300}{SEPARATOR}", f"{CALL}{'x' * 300}{SEPARATOR}", []),
    (v31, f"{CALL}weather", f"{CALL}weather", []),
    (kimi, kimi_section("<|tool_call_begin|>weather<|tool_call_argument_begin|>{}"), None, []),
    (qwen, "<tool_call>oops</tool_call> x", "<tool_call>oops</tool_call> x", []),
    (qwen, "<tool_call>\n<function=", "<tool_call>\n<function=", []),
    (qwen, f"<function={'x' * 300}>", f"<function={'x' * 300}>", []),
    (qwen, "a <function b", "a <function b", []),
    (glm, "<tool_call>oops</tool_call> x", "<tool_call>oops</tool_call> x", []),
    (glm, '<tool_call>{"name": "weather"}</tool_call>', '<tool_call>{"name": "weather"}</tool_call>', []),
    (glm, "<tool_call>weather", "<tool_call>weather", []),
    (pythonic, "[1, 2]", "[1, 2]", []),
    (pythonic, "[link](https://a.b)", "[link](https://a.b)", []),
    (pythonic, "[weather(3)]", "[weather(3)]", []),
    (pythonic, "[sunny(city='Oslo')]", "[sunny(city='Oslo')]", []),
    (pythonic, "[weather(ci", "[weather(ci", []),
    (pythonic, "[]", "[]", []),
    (pythonic, "See [weather(city='Oslo')]", "See [weather(city='Oslo')]", []),
    (pythonic, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (pythonic, "<function_calls>\noops</function_calls>", "<function_calls>\noops</function_calls>", []),
    # Calls.
    (v31, deepseek(v31_call()), "", [("weather", FULL)]),
    (v31, f"I look.\n\n{deepseek(v31_call(), v31_call('now', '{}'))}", "I look.", [("weather", FULL), ("now", {})]),
    (v31, f"{deepseek(v31_call())} done ", "done ", [("weather", FULL)]),
    (v31, v31_call(), "", [("weather", FULL)]),
    (v31, f"{SECTION[0]}{v31_call()}", "", [("weather", FULL)]),
    (v31, f"{CALL}now{SEPARATOR}{CALL_END}", "", [("now", {})]),
    (v31, f"{CALL}now{SEPARATOR}{{}}{CALL} now {SEPARATOR} {{}}", "", [("now", {})] * 2),
    (v31, deepseek(v31_call(arguments="{}"), " well"), "well" + SECTION[1], [("weather", {})]),
    (v3, deepseek(v3_call(), v3_call("now", "{}"), between="\n"), "", [("weather", FULL), ("now", {})]),
    (v3, f"Hm. {deepseek(v3_call())}", "Hm.", [("weather", FULL)]),
    (v3, f"{SECTION[0]}{v3_call().replace('```' + CALL_END, CALL_END)}", "", [("weather", FULL)]),
    (kimi, f"So: {kimi_section(kimi_call())}", "So:", [("weather", FULL)]),
    (kimi, kimi_section(kimi_call(), kimi_call("now", "{}", 1)), "", [("weather", FULL), ("now", {})]),
    (kimi, kimi_section(kimi_call("a-b.c_d", "{}", 12)), "", [("a-b.c_d", {})]),
    (qwen, qwen_call(**TEXTS), "", [("weather", TYPED)]),
    (qwen, f"I look.\n{qwen_call(city='Oslo')}\n{qwen_call('now')}", "I look.", [("weather", CITY), ("now", {})]),
    (qwen, qwen_call("write", content=FILE), "", [("write", {"content": FILE})]),
    (qwen, qwen_call(city=FILE + "\\ \"'\t</parameter"), "", [("weather", {"city": FILE + "\\ \"'\t</parameter"})]),
    (qwen, qwen_call(city=""), "", [("weather", {"city": ""})]),
    (qwen, "<function=weather><parameter=city>Oslo</parameter></function> b", "b", [("weather", CITY)]),
    (qwen, f"{qwen_call(city='Oslo').removesuffix('</tool_call>')}next", "next", [("weather", CITY)]),
    (qwen, "<tool_call><function=weather><parameter=city>Oslo</parameter>junk</tool_call>", "", [("weather", CITY)]),
    (glm, glm_call(**TEXTS), "", [("weather", TYPED)]),
    (glm, f"I look.\n{glm_call(city='Oslo')}{glm_call('now')}", "I look.", [("weather", CITY), ("now", {})]),
    (glm, glm_call(city=FILE), "", [("weather", {"city": FILE})]),
    (glm, glm_call(city="Oslo").replace("\n", "") + " b", "b", [("weather", CITY)]),
    (glm, "<tool_call>now</tool_call>", "", [("now", {})]),
    (pythonic, "[weather(city='Oslo', days=3), now()]", "", [("weather", {"city": "Oslo", "days": 3}), ("now", {})]),
    (pythonic, ' [ weather ( city = "O\'s\\nlo" , )]', None, []),
    (pythonic, ' [ weather( city = "O\'s\\nlo" , ) ] ', "", [("weather", {"city": "O's\nlo"})]),
    (pythonic, "[weather(city='a, b) ]', where=[1, (2, -3.5)])]", "", [("weather", {"city": "a, b) ]", "where": [1, [2, -3.5]]})]),  # noqa: E501
    (pythonic, "[weather(exact=True, either=None)] x", "x", [("weather", {"exact": True, "either": None})]),
    (pythonic, "[weather(exact=false, either={'a': {'b': null}})]", "", [("weather", {"exact": False, "either": {"a": {"b": None}}})]),  # noqa: E501
    (pythonic, "<|python_start|>[now()]<|python_end|>", "", [("now", {})]),
    (pythonic, "[weather(city='a\nb')]", "", [("weather", {"city": "a\nb"})]),
    (pythonic, "Hm.\n<function_calls>\nweather(city='Oslo')\nnow()\n</function_calls>", "Hm.", [("weather", CITY), ("now", {})]),  # noqa: E501
]  # fmt: skip
CASES = [(new, text, text if content is None else content, calls) for new, text, content, calls in CASES]
IDS = [f"{index}-{case[0].__name__}-{case[1][:24]!a}" for index, case in enumerate(CASES)]


def found(delta: MessageDelta) -> tuple[str, list]:
    return delta.content, [(call.name, json.loads(call.arguments)) for call in delta.tool_calls]


def pushed(new: Callable[[], Parser], pieces: list[str]) -> MessageDelta:
    parser, got = new(), MessageDelta()
    for piece in pieces:
        got = got.plus(parser.push(piece))
    return got.plus(parser.flush())


@pytest.mark.parametrize(("new", "text", "content", "calls"), CASES, ids=IDS)
def test_a_whole_text_is_taken_apart(new, text, content, calls):
    assert found(new().parse(text)) == (content, calls)


@pytest.mark.few(16)
@pytest.mark.parametrize(("new", "text", "content", "calls"), CASES, ids=IDS)
def test_every_way_to_cut_a_text_in_two_and_one_character_at_a_time_bring_the_same(new, text, content, calls):
    whole = new().parse(text)
    assert pushed(new, list(text)) == whole
    for cut in range(1, len(text)):
        assert pushed(new, [text[:cut], text[cut:]]) == whole


@pytest.mark.slow
@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_mixtures_of_marks_are_read_the_same_however_they_are_cut(count):
    rng = Random(7)
    pieces = [*SECTION, CALL, CALL_END, SEPARATOR, "function", "weather", "now", "```json", "```", "\n", " ", "{", "}"]
    pieces += [ARGUMENTS, kimi_section(kimi_call()), "<|tool_call_begin|>", "functions.now:1", "<|tool_call_end|>"]
    pieces += ["<|tool_call_argument_begin|>", "<tool_call>", "</tool_call>", "<function=", "</function>", ">", "="]
    pieces += ["<parameter=", "</parameter>", "city", "days", "3", "<arg_key>", "</arg_key>", "<arg_value>", ",", "'"]
    pieces += ["</arg_value>", "[", "]", "(", ")", '"', "\\", "weather(city=", "now()", "<function_calls>", "é", "True"]
    pieces += ["</function_calls>", "<|python_start|>", "<|python_end|>", qwen_call(city="x"), glm_call(days="1")]
    for _ in range(count):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 14)))
        for new in (v31, v3, kimi, pythonic, qwen, glm):
            whole = new().parse(text)
            cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 20)))
            pieced = [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]
            assert pushed(new, pieced) == whole, (new.__name__, pieced)
            assert pushed(new, list(text)) == whole, (new.__name__, text)


STREAMED = [
    (v31, deepseek(v31_call())),
    (v3, deepseek(v3_call())),
    (kimi, kimi_section(kimi_call())),
    (qwen, qwen_call(city="A long story\nin lines", days="3")),
    (glm, glm_call(city="A long story\nin lines", days="3")),
    (pythonic, "[weather(city='Oslo', days=3, where=[1])]"),
]


@pytest.mark.parametrize(("new", "text"), STREAMED, ids=lambda value: getattr(value, "__name__", None))
def test_a_name_comes_first_and_arguments_as_they_are_written(new, text):
    parser, deltas = new(), []
    for char in text:
        deltas += parser.push(char).tool_calls
    assert deltas[0].name == "weather"
    assert deltas[0].id
    assert {(delta.name, delta.id) for delta in deltas[1:]} == {(None, None)}
    assert max(len(delta.arguments) for delta in deltas) <= 12
    assert json.loads("".join(delta.arguments for delta in deltas))
    assert parser.flush() == MessageDelta()


@pytest.mark.parametrize(("new", "text"), STREAMED, ids=lambda value: getattr(value, "__name__", None))
def test_a_text_that_breaks_off_says_no_mark_once_a_call_has_begun(new, text):
    for length in range(len(text)):
        message = new().parse(text[:length])
        assert not (message.tool_calls and message.content)
        assert message.tool_calls or message.content == text[:length]


def test_kimis_ids_are_those_of_the_text():
    message = kimi().parse(kimi_section(kimi_call(number=3), kimi_call("now", "{}", 4)))
    assert [call.id for call in message.tool_calls] == ["functions.weather:3", "functions.now:4"]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "3", "3"),
        ("city", " true ", " true "),
        ("city", '{"a": 1}', '{"a": 1}'),
        ("days", "3", 3),
        ("days", "three", "three"),
        ("days", "NaN", "NaN"),
        ("exact", "false", False),
        ("exact", "None", None),
        ("either", "2.5", 2.5),
        ("either", "4", 4),
        ("either", "a lot", "a lot"),
        ("where", '\n[{"a": "b"}]\n', [{"a": "b"}]),
        ("other", "7", 7),
        ("other", "seven", "seven"),
        ("other", '"quoted"', '"quoted"'),
        ("other", '{"a": [null]}', {"a": [None]}),
        ("other", "{" * 5000, "{" * 5000),
    ],
)
def test_values_have_the_types_of_the_functions_schema(key, text, value):
    assert found(glm().parse(glm_call(**{key: text})))[1] == [("weather", {key: value})]


def test_without_a_schema_every_name_is_a_function():
    assert found(Glm45Parser().parse(glm_call("other", days="3")))[1] == [("other", {"days": 3})]
    assert found(PythonicParser().parse("[other(days=3)]"))[1] == [("other", {"days": 3})]
    for schema in ({"properties": 3}, {"properties": {"days": 3}}, {"properties": {"days": {"$ref": "#/$defs/x"}}}):
        parser = Qwen3CoderParser().set_functions([Function("weather", schema)])
        assert found(parser.parse(qwen_call(days="3")))[1] == [("weather", {"days": 3})]


def test_a_schema_that_refers_to_itself_ends():
    schema = {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 100}}}
    assert found(Glm45Parser().set_functions([Function("f", schema)]).parse(glm_call("f", a="1")))[1] == [
        ("f", {"a": 1})
    ]


@pytest.mark.parametrize(
    "value", ["__import__('os')", "f(1)", "1 + 1", "b'x'", "1e999", "x", "{1: 2}", "[" * 300, "'a"]
)
def test_a_value_that_is_no_literal_breaks_the_call_off(value):
    message = pythonic().parse(f"[weather(city='Oslo', days={value})]")
    assert message.content == ""
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("weather", '{"city": "Oslo", "days": ')]
