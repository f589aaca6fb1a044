"""The parser reads every text that the calls' grammar allows, as calls whose arguments fit their schemas."""

import json
from random import Random

import jsonschema
import pytest

from tests.deployments.http_world import VOCAB_SIZE, byte_tokenizer
from tests.deployments.parsing.test_model_formats import (
    deepseek,
    glm_call,
    kimi_call,
    kimi_section,
    qwen_call,
    v3_call,
    v31_call,
)
from tests.runtime.grammar import walks
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.errors import as_api_error
from wingbeat.deployments.api.parsed.reading import reading_of
from wingbeat.deployments.fleet.interface import RequestRefused
from wingbeat.deployments.parsing.call_format import Function
from wingbeat.deployments.parsing.formats.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from wingbeat.deployments.parsing.formats.harmony import HarmonyParser
from wingbeat.deployments.parsing.formats.hermes import HermesParser
from wingbeat.deployments.parsing.formats.llama_json import LlamaJsonParser
from wingbeat.deployments.parsing.formats.marked_json import KimiK2Parser
from wingbeat.deployments.parsing.formats.mistral import MistralParser
from wingbeat.deployments.parsing.formats.tagged_text import Glm45Parser, Qwen3CoderParser
from wingbeat.deployments.parsing.message import MessageDelta, Parser
from wingbeat.deployments.parsing.registry import Parsers
from wingbeat.runtime.grammar.compiler import Grammars
from wingbeat.runtime.grammar.grammar_masker import RequestGrammar
from wingbeat.runtime.scheduling.request import GrammarSpec

TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, VOCAB_SIZE, frozenset({0}))
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 99}},
}
FUNCTIONS = [Function("weather", CITY), Function("now", {"type": "object", "properties": {}, "maxProperties": 0})]
OWN = [HermesParser, LlamaJsonParser, MistralParser, HarmonyParser]
OWN += [DeepSeekV3Parser, DeepSeekV31Parser, KimiK2Parser, Qwen3CoderParser, Glm45Parser]
BY_NAME = ["hermes", "llama3_json", "mistral", "harmony", "deepseek_v3", "deepseek_v31", "kimi_k2", "qwen3_coder"]
BY_NAME += ["glm45", "pythonic"]


def grammar(form: dict) -> RequestGrammar:
    return GRAMMARS.compile(GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": form})))


def accepts(form: dict, text: str) -> bool:
    return walks.accepts(grammar(form), text)


def walk(form: dict, rng: Random, length: int = 400) -> str | None:
    """Text that the grammar allows, drawn token by token; None if it does not end within `length` tokens."""
    made, text = grammar(form), []
    found = made.matcher()
    while len(text) < length:
        allowed = walks.allowed_tokens(found, made.vocabulary)
        token_id = 0 if 0 in allowed else rng.choice(allowed)
        found.consume_token(token_id)
        if token_id == 0:
            return TOKENIZER.decode(text)
        text.append(token_id)
    return None


def check(message: MessageDelta, several: bool) -> None:
    schemas = {function.name: function.schema for function in FUNCTIONS}
    assert message.tool_calls
    assert several or len(message.tool_calls) == 1
    for call in message.tool_calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.few(6)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("parser", OWN)
def test_an_answer_that_must_call_is_read_as_calls(parser: type[Parser], several: bool):
    form, rng, texts = parser.calls_format(FUNCTIONS, several), Random(3), set()
    for _ in range(12):
        text = walk(form, rng)
        if text is None:
            continue
        message = parser().set_functions(FUNCTIONS).parse(text)
        assert not message.content.strip()
        check(message, several)
        texts.add(text)
    assert len(texts) > 3


HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'


def test_text_may_stand_around_calls_that_need_not_be_made_but_their_arguments_must_fit():
    form = HermesParser.text_format(FUNCTIONS, True)
    assert accepts(form, "No call.")
    assert accepts(form, f"I look.\n{HERMES_CALL}")
    assert not accepts(form, HERMES_CALL.replace("Oslo", "Bonn"))
    assert not accepts(form, HERMES_CALL.replace("weather", "wether"))
    form = LlamaJsonParser.text_format(FUNCTIONS, True)
    call = '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}'
    assert accepts(form, "No call.\nNone { at all")
    assert accepts(form, call)
    assert not accepts(form, call.replace("3", "333"))


WEATHER = '{"city": "Oslo", "days": 3}'
V31 = deepseek(v31_call(arguments=WEATHER))
V3 = deepseek(v3_call(arguments=WEATHER))
KIMI = kimi_section(kimi_call(arguments=WEATHER))


@pytest.mark.parametrize(
    ("parser", "call"),
    [
        (DeepSeekV31Parser, V31),
        (DeepSeekV3Parser, V3),
        (KimiK2Parser, KIMI),
        (Qwen3CoderParser, qwen_call(city="Oslo", days="3")),
        (Glm45Parser, glm_call(city="Oslo", days="3")),
    ],
)
def test_what_models_write_is_of_the_form_as_far_as_the_arguments_fit(parser, call):
    strict, free = parser.calls_format(FUNCTIONS, True), parser.text_format(FUNCTIONS, True)
    for form, before in ((strict, ""), (free, ""), (free, "I look.\n")):
        assert accepts(form, before + call)
        assert not accepts(form, before + call.replace("Oslo", "Bonn"))
        assert not accepts(form, before + call.replace("weather", "wether"))
    assert accepts(free, "No call.")
    assert not accepts(strict, "No call.")
    anything = parser.text_format([Function("weather", {"type": "object"})], True)
    assert accepts(anything, call.replace("Oslo", "Bonn"))


@pytest.mark.few(4)
@pytest.mark.parametrize("parser", [Qwen3CoderParser, Glm45Parser])
@pytest.mark.parametrize(
    ("words", "good", "bad"),
    [
        ({"format": "date"}, "2024-02-29", "2023-02-29"),
        ({"format": "date-time"}, "2024-12-31T23:59:59Z", "2024-12-31"),
        ({"format": "time"}, "08:00:00+01:00", "8 o'clock"),
        ({"format": "email"}, "a.b@example.org", "a.b"),
        ({"format": "hostname"}, "a-b.example", "-a"),
        ({"format": "ipv4"}, "10.0.0.255", "10.0.0.256"),
        ({"format": "ipv6"}, "fe80::1", "fe80::1::2"),
        ({"format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000", "123e4567"),
        ({"format": "duration"}, "P1DT2H", "1 day"),
        ({"format": "uri"}, "https://a.example/b?c=d#e", "a b"),
        ({"format": "date", "pattern": "^2"}, "2024-01-01", "1999-01-01"),
        ({"pattern": "^https?://"}, "http://a", "ftp://a"),
        ({"pattern": "b|^c$"}, "abd", "cc"),
        ({"pattern": r"[]x|$^]\$$"}, "ab|$", "ab|"),
        ({"pattern": "^a+$", "minLength": 2, "maxLength": 3}, "aa", "a"),
    ],
    ids=str,
)
def test_strings_between_marks_are_held_to_every_keyword(parser, words: dict, good: str, bad: str):
    schema = {"type": "object", "properties": {"city": {"type": "string", **words}}, "required": ["city"]}
    form = parser.calls_format([Function("weather", schema)], False)
    call = glm_call if parser is Glm45Parser else qwen_call
    assert accepts(form, call(city=good))
    assert not accepts(form, call(city=bad))


def test_an_anchor_inside_of_an_expression_between_marks_is_refused_by_place():
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "x(^a|b)"}}}
    with pytest.raises(ValueError, match=r"'pattern', which has the anchor '\^' elsewhere"):
        grammar(Qwen3CoderParser.calls_format([Function("weather", schema)], False))


@pytest.mark.parametrize(
    ("reasoning", "prompt", "before", "not_before"),
    [
        (None, "", [""], ["<think>a</think>"]),
        ("qwen3", "", ["", "<think>a</think>\n\n"], ["a</think>"]),
        ("qwen3", "<think>\n", ["a < b</think>\n\n"], [""]),
        ("qwen3", "<think>\n\n</think>\n\n", [""], ["<think>a</think>"]),
        ("deepseek_r1", "", ["a</think>", "<think>a</think>"], [""]),
    ],
)
def test_thoughts_come_before_the_form_of_an_answer(reasoning, prompt, before, not_before):
    parsers = Parsers("hermes", reasoning)
    form = parsers.calls_format(FUNCTIONS, False, required=True, prompt=prompt)
    for thoughts in before:
        text = thoughts + HERMES_CALL
        assert accepts(form, text)
        check(parsers.new(prompt, calls=True).parse(text), False)
    assert not any(accepts(form, thoughts + HERMES_CALL) for thoughts in not_before)


def test_harmonys_answers_of_a_form_stand_in_the_channel_for_answers():
    form = Parsers("harmony").behind_thoughts("", {"type": "const_string", "value": "yes"})
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes"
    assert accepts(form, text)
    assert Parsers("harmony").new("").parse(text) == MessageDelta("yes", "hm")


@pytest.mark.parametrize("name", BY_NAME)
def test_every_form_of_a_server_compiles(name):
    for required in (False, True):
        form = Parsers(name, "deepseek_r1").calls_format(FUNCTIONS, True, required=required, prompt="")
        assert form is None or not accepts(form, '{"name": "other"')


@pytest.mark.few(2)
@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "has the keyword 'not' at #/properties/a, which"),
        ({"type": "object", "properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}}, "required": ["a"]},
         "cannot be compiled: "),
    ],
    ids=["keyword", "empty"],
)  # fmt: skip
def test_one_bad_schema_among_many_tools_is_named_with_its_tool(parser, schema, reason):
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": CITY}} for n in range(117)]
    tools[71]["function"]["parameters"] = schema
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
    asked = reading_of(Parsers(parser), ChatBody.parse(json.dumps(body).encode()), "", None).grammar
    with pytest.raises(ValueError, match="71") as caught:
        GRAMMARS.compile(asked)
    error = as_api_error(RequestRefused(str(caught.value)))
    assert (error.status, error.param) == (400, "tools[71].function.parameters")
    assert f"of 'f71' {reason}" in str(error)
    tools[71]["function"]["parameters"] = CITY
    asked = reading_of(Parsers(parser), ChatBody.parse(json.dumps(body).encode()), "", None).grammar
    assert GRAMMARS.compile(asked)
