"""A model's parsers are recognised from its chat template's text of earlier calls and reasoning."""

import pytest

from tests.deployments.http_world import byte_tokenizer
from tests.deployments.tool_world import TEMPLATE
from wingbeat.deployments.parsing.formats.deepseek import CALL, SECTION, SEPARATOR
from wingbeat.deployments.parsing.names import REASONING_PARSERS, TOOL_CALL_PARSERS
from wingbeat.deployments.parsing.registry import Parsers, recognise

WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
OLD_CALL = "{% for c in m.tool_calls %}"
TEMPLATES = {
    "hermes": OLD_CALL + '<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>',
    "qwen3_coder": OLD_CALL + "{{- '<tool_call>\\n<function=' + c.name + '>\\n' }}{{- '<parameter=' + name + '>\\n' }}",
    "glm45": OLD_CALL
    + "<tool_call>{{ c.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value></tool_call>",
    "mistral": OLD_CALL + "{{ '[TOOL_CALLS]' + c.name }}",
    "kimi_k2": OLD_CALL + "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>",
    "deepseek_v3": OLD_CALL + f"{SECTION[0]}{CALL}" + "{{ c.type }}" + SEPARATOR + "{{ c.name + '\\n```json\\n' }}",
    "deepseek_v31": OLD_CALL + f"{SECTION[0]}{CALL}" + "{{ c.name }}" + SEPARATOR + "{{ c.arguments }}",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.{{ c.name }}<|message|>",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of names and values}.',
    "pythonic": "Put it in the format of [func_name1(params_name1=params_value1), func_name2(params)].",
}
MORE = {
    "llama3_json": "{{ 'Environment: ipython' }}<|python_tag|>",
    "pythonic": "<function_calls>\n{{ c.name }}({{ c.arguments }})\n</function_calls>",
}


@pytest.mark.parametrize(("name", "template"), [*TEMPLATES.items(), *MORE.items()])
def test_a_form_of_calls_is_known_by_its_marks(name, template):
    found = recognise(WITH_TOOLS + template)
    assert (found.tool_call_parser, found.shows_tools) == (name, True)
    assert name in TOOL_CALL_PARSERS
    assert found.reasoning_parser in {*REASONING_PARSERS, None}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>{% endif %}", "qwen3"),
        ("{% set content = content.split('</think>')[-1] %}", "qwen3"),
        ("[THINK]{{ m.reasoning }}[/THINK]", "mistral"),
        ("<|channel|>analysis<|message|>", "harmony"),
        ("{{ m.content }}", None),
        ("I think </thin>", None),
    ],
)
def test_a_form_of_thoughts_is_known_by_its_marks(template, name):
    assert recognise(template).reasoning_parser == name


@pytest.mark.parametrize("template", [None, "", "{{ m.content }}", "<tool_call>{{ toolset }}"])
def test_a_template_that_reads_no_tools_has_no_form_of_calls(template):
    assert recognise(template) == (None, None, False)


def test_a_name_that_is_given_counts_more_than_the_template():
    template = WITH_TOOLS + TEMPLATES["hermes"] + "</think>"
    assert Parsers.of_template("auto", "auto", template).names == ("hermes", "qwen3")
    assert Parsers.of_template("mistral", "auto", template).names == ("mistral", "qwen3")
    assert Parsers.of_template(None, None, template).names == (None, None)
    assert Parsers.of_template("auto", "deepseek_r1", None).names == (None, "deepseek_r1")


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (WITH_TOOLS + TEMPLATES["glm45"] + "</think>", "tool calls are read as glm45; reasoning is read as qwen3"),
        (
            WITH_TOOLS,
            "tool calls are left in the text, because the chat template has no known call format; reasoning is not "
            "parsed",
        ),
        (None, "the chat template does not show tools to the model; reasoning is not parsed"),
    ],
)
def test_a_start_says_what_is_found_in_one_line(template, line):
    assert Parsers.of_template("auto", "auto", template).describe() == line


def test_the_template_is_the_tokenizers():
    assert recognise(byte_tokenizer(TEMPLATE).chat_template) == ("hermes", "qwen3", True)
    several = byte_tokenizer()
    several.hugging_face.chat_template = {"default": "{{ m }}", "tool_use": WITH_TOOLS + TEMPLATES["mistral"]}
    assert recognise(several.chat_template).tool_call_parser == "mistral"
    several.hugging_face.chat_template = None
    assert several.chat_template is None
