"""Conversations that hold calls as models write them: whatever the arguments are, the next request is served."""

import json

import pytest

from tests.deployments.http_world import byte_tokenizer, call
from tests.deployments.tool_world import CALL, PARSERS, USER, WEATHER, ToolPool

WRITES = {
    "as text or JSON": "{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}",
    "as JSON": "{{ a | tojson }}",
    "one by one": "{% for k, v in a.items() %}<{{ k }}>{{ v }}{% endfor %}",
    "one by one, by a filter": "{% for k, v in a | items %}<{{ k }}>{{ v }}{% endfor %}",
}
"""Templates by the way in which they print a call's arguments."""
CUT = '{"city": "Par'
NO_OBJECTS = [CUT, '{"n": 1,}', "[1, 2]", "3", '"x"', "oops", "[" * 5000, '{"n": ' + "1" * 5000 + "}"]
EMPTY = [None, "", "  ", "null", {}]
TOOL = {"role": "tool", "tool_call_id": "c", "content": "sunny"}


def tokenizer(writes: str):
    calls = f"{{% for c in m.tool_calls or [] %}}{{% set a = c.function.arguments %}}[{writes}]{{% endfor %}}"
    return byte_tokenizer(f"{{% for m in messages %}}{{{{ m.content }}}}{calls}|{{% endfor %}}{{# tools #}}")


def prompt(pool: ToolPool, kind: str, path: str, body: dict) -> str:
    writer = tokenizer(WRITES[kind])
    answer = call(pool, path, body, tokenizer=writer, parsers=PARSERS)
    assert answer.status_code == 200, answer.text
    return writer.decode(pool.requests[-1].prompt_token_ids)


def bodies(arguments) -> dict[str, dict]:
    """Bodies of one conversation, by endpoint."""
    function = {"name": "weather", "arguments": arguments}
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    used = {"type": "tool_use", "id": "c", "name": "weather", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "sunny"}
    return {
        "/v1/chat/completions": {"messages": [USER, said, TOOL], "max_tokens": 5},
        "/v1/messages": {
            "messages": [USER, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}],
            "max_tokens": 5,
        },
        "/v1/responses": {
            "input": [
                USER,
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": arguments},
                {"type": "function_call_output", "call_id": "c", "output": "sunny"},
            ],
            "max_output_tokens": 5,
        },
    }


@pytest.mark.few(6)
@pytest.mark.parametrize("path", list(bodies("")))
@pytest.mark.parametrize("arguments", NO_OBJECTS, ids=[text[:10] for text in NO_OBJECTS])
def test_a_template_gets_the_text_of_arguments_that_are_no_object(arguments, path):
    pool = ToolPool("fine")
    assert prompt(pool, "as text or JSON", path, bodies(arguments)[path]) == f"hi|[{arguments}]|sunny|"


@pytest.mark.parametrize("kind", ["one by one", "one by one, by a filter"])
def test_a_template_that_writes_argument_by_argument_gets_none_of_them(kind):
    for arguments in NO_OBJECTS:
        body = bodies(arguments)["/v1/chat/completions"]
        assert prompt(ToolPool("fine"), kind, "/v1/chat/completions", body) == "hi|[]|sunny|"


@pytest.mark.parametrize("path", list(bodies("")))
@pytest.mark.parametrize("arguments", EMPTY, ids=repr)
def test_no_arguments_are_an_empty_object(arguments, path):
    assert prompt(ToolPool("fine"), "as JSON", path, bodies(arguments)[path]) == "hi|[{}]|sunny|"


@pytest.mark.parametrize("path", list(bodies("")))
def test_arguments_as_an_object_or_as_its_text_are_the_same(path):
    for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}'):
        assert prompt(ToolPool("fine"), "one by one", path, bodies(arguments)[path]) == "hi|[<city>Oslo]|sunny|"


def test_arguments_may_be_left_out():
    body = bodies("")["/v1/chat/completions"]
    del body["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert prompt(ToolPool("fine"), "as JSON", "/v1/chat/completions", body) == "hi|[{}]|sunny|"


@pytest.mark.few(8)
@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("max_tokens", range(1, len(CALL) + 1, 7))
def test_whatever_a_cut_answer_was_its_message_can_be_sent_back(kind, max_tokens):
    pool, body = ToolPool(CALL), {"messages": [USER], "tools": [WEATHER], "max_tokens": max_tokens}
    writer = tokenizer(WRITES[kind])
    answer = call(pool, "/v1/chat/completions", body, tokenizer=writer, parsers=PARSERS).json()
    said = answer["choices"][0]["message"]
    body["messages"] = [USER, said, *([TOOL] if said.get("tool_calls") else []), USER]
    again = call(pool, "/v1/chat/completions", body, tokenizer=writer, parsers=PARSERS)
    assert again.status_code == 200, again.text
    if said.get("tool_calls") and kind == "as text or JSON":
        text = said["tool_calls"][0]["function"]["arguments"]
        assert f"[{text or '{}'}]" in writer.decode(pool.requests[-1].prompt_token_ids)


def test_a_template_that_refuses_both_is_a_400():
    writes = "{{ raise_exception('no calls') }}"
    body = {"messages": bodies(CUT)["/v1/chat/completions"]["messages"]}
    answer = call(ToolPool("fine"), "/v1/chat/completions", body, tokenizer=tokenizer(writes), parsers=PARSERS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "no calls" in json.dumps(answer.json())
