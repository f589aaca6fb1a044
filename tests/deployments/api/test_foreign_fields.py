"""Every field of vLLM's, SGLang's and llama.cpp's requests is served, without effect on the text, or refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.api.foreign_fields import CHAT, COMPLETIONS, DATA, MESSAGES, RESPONSES
from tests.deployments.http_world import BODIES, call
from tests.deployments.tool_world import PARSERS, TOKENIZER, USER, ToolPool
from tests.optional import is_gone, kept
from wingbeat.deployments.api.bodies.sampling_fields import SamplingFields
from wingbeat.deployments.api.bodies.unserved_fields import HEADER, WITHOUT_EFFECT
from wingbeat.deployments.api.foreign.fields import FOREIGN

FIELDS: dict[str, dict[str, list[str]]] = json.loads(DATA.read_text(encoding="utf-8"))
PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"} | {
    RESPONSES: "/v1/responses",
    MESSAGES: "/v1/messages",
}
KINDS = {endpoint: BODIES[path] for endpoint, path in PATHS.items() if path in BODIES}
OWN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "seed": 1},
    COMPLETIONS: {"prompt": "hi", "seed": 1},
    RESPONSES: {"input": "hi", "seed": 1},
    MESSAGES: {"messages": [USER], "max_tokens": 5, "seed": 1},
}
DOCUMENT = Path(__file__).parents[3] / "docs" / "http_api.md"
ASKING: dict[str, Any] = {
    "cache_prompt": False,
    "repeat_last_n": 64,
    "n_keep": 5,
    "separate_reasoning": False,
    "reasoning_format": "none",
    "stream_reasoning": False,
    "mm_payload": "none",
    "function_call": {"name": "f"},
    "spaces_between_special_tokens": False,
    "max_completion_tokens": 7,
}
"""Values that ask for something, where 7 does not."""
SERVED, WITHOUT, REFUSED = "served", "without effect on the text", "refused"


def names(endpoint: str) -> list[str]:
    return sorted({name for fields in FIELDS.values() for name in fields.get(endpoint, ())})


def kind_of(endpoint: str, name: str) -> str:
    """Kind that the tables give a field that asks for something."""
    body = KINDS[endpoint]
    rule = body.unserved.get(name)
    if rule is not None:
        return REFUSED if rule.is_refused else WITHOUT
    if name in {field.alias or key for key, field in body.model_fields.items()}:
        return SERVED
    return WITHOUT if name in WITHOUT_EFFECT else "unknown"


def ask(endpoint: str, **fields: Any):
    pool = ToolPool("<think>hm</think>fine")
    answer = call(pool, PATHS[endpoint], OWN[endpoint] | fields, tokenizer=TOKENIZER, parsers=PARSERS)
    return answer, pool


def text(answer: dict[str, Any]) -> Any:
    """Output parts of an answer, without the ids that differ between two answers."""
    parts = answer.get("choices") or answer.get("output") or answer["content"]
    return [{name: value for name, value in part.items() if name != "id"} for part in parts]


EACH = [(endpoint, name) for endpoint in KINDS for name in names(endpoint)]


def test_every_field_of_the_other_servers_is_known():
    assert {len(fields[endpoint]) > 40 for fields in FIELDS.values() for endpoint in (CHAT, COMPLETIONS)} == {True}
    assert [len(names(endpoint)) > least for endpoint, least in ((RESPONSES, 50), (MESSAGES, 20))] == [True, True]
    assert [
        (endpoint, name) for endpoint, name in EACH if kind_of(endpoint, name) == "unknown" and not is_gone(name)
    ] == []


def test_every_rule_is_for_a_field_of_one_of_them():
    assert sorted(FOREIGN.keys() - {name for _, name in EACH}) == []


def test_a_refused_field_is_a_400_that_names_it():
    for endpoint, name in EACH:
        if kind_of(endpoint, name) == REFUSED:
            answer, pool = ask(endpoint, **{name: ASKING.get(name, 7)})
            assert answer.status_code == 400, (endpoint, name)
            assert answer.json()["error"]["param"] == name
            assert pool.requests == []
            assert ask(endpoint, **{name: None})[0].status_code == 200, (endpoint, name)


@pytest.mark.slow
def test_what_is_without_effect_changes_neither_the_request_nor_the_text():
    for endpoint in KINDS:
        plain, plain_pool = ask(endpoint)
        for name in names(endpoint):
            if kind_of(endpoint, name) == WITHOUT:
                answer, pool = ask(endpoint, **{name: ASKING.get(name, 7)})
                assert answer.status_code == 200, (endpoint, name, answer.text)
                assert pool.requests[0].params == plain_pool.requests[0].params
                assert pool.requests[0].prompt_token_ids == plain_pool.requests[0].prompt_token_ids
                assert text(answer.json()) == text(plain.json())


@pytest.mark.slow
def test_a_served_field_is_never_named_as_ignored():
    for endpoint, name in EACH:
        if kind_of(endpoint, name) == SERVED:
            answer, _ = ask(endpoint, **{name: 7})
            assert name not in answer.headers.get(HEADER, ""), (endpoint, name)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_grammar_of_another_server_is_refused_at_every_endpoint(path):
    own = {"input": "hi"} if path == "/v1/responses" else {"messages": [USER], "max_tokens": 5}
    for name in ("regex", "ebnf", "grammar", "json_schema", "stop_regex", "thinking_token_budget"):
        answer = call(ToolPool("x"), path, {**own, name: "a"}, tokenizer=TOKENIZER, parsers=PARSERS)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


SHAPING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"65": 5},
    "allowed_token_ids": [65, 66],
    "bad_words": ["bad"],
    "min_tokens": 2,
    "stop_token_ids": [67],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "priority": 3,
    "cache_salt": "salt",
    "structured_outputs": {"regex": "[a-z]+"},
    "speculation": {"enabled": False},
}
"""A value of each that its default is not."""
OF_ROUTERS = ("include_stop_str_in_output", "skip_special_tokens")
"""Fields that routers handle themselves, without the engine."""
TOLD_OTHERWISE = {
    "stop",
    "response_format",
    "seed",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
}
"""Fields of sampling that those bodies have under another name, that `ask` gives, or that their answers have no room
for."""


def test_whatever_shapes_a_chat_shapes_a_response_and_a_message_alike():
    assert SamplingFields.model_fields.keys() - TOLD_OTHERWISE <= SHAPING.keys()
    for endpoint in {RESPONSES, MESSAGES} & KINDS.keys():
        assert SHAPING.keys() <= KINDS[endpoint].model_fields.keys()
        own = {"max_output_tokens" if endpoint == RESPONSES else "max_tokens": 5}
        plain = asked(endpoint, **own)
        for name, value in kept(SHAPING).items():
            ours = asked(endpoint, **own, **{name: value})
            assert ours == asked(CHAT, max_tokens=5, **{name: value}), (endpoint, name)
            assert ours != plain or name in OF_ROUTERS, (endpoint, name)
            bad, _ = ask(endpoint, **{name: [[]]})
            assert (bad.status_code, bad.json()["error"]["param"].partition("[")[0]) == (400, name)


@pytest.mark.parametrize(("path", "stop"), [("/v1/responses", "stop"), ("/v1/messages", "stop_sequences")])
def test_a_stop_string_is_kept_where_that_is_asked_for(path, stop):
    endpoint = next(name for name in PATHS if PATHS[name] == path)
    most = {"max_tokens": 100} if endpoint == MESSAGES else {}
    for shown, end in ((False, "fi"), (True, "fine")):
        answer, _ = ask(endpoint, include_stop_str_in_output=shown, **{stop: ["ne"]}, **most)
        written = text(answer.json())[-1]
        assert (written["content"][0] if endpoint == RESPONSES else written)["text"] == end


def asked(endpoint: str, **fields: Any) -> tuple[Any, ...]:
    """Sampling parameters and prompt that reach the engine."""
    answer, pool = ask(endpoint, **fields)
    assert (answer.status_code, HEADER in answer.headers) == (200, False), (endpoint, fields, answer.text)
    (request,) = pool.requests
    return (request.params, request.prompt_token_ids)


@pytest.mark.parametrize(
    ("side", "kept"), [(None, "efgh"), ("left", "efgh"), ("right", "abcd")], ids=["default", "left", "right"]
)
def test_a_prompt_is_cut_at_the_side_that_is_asked_for(side, kept):
    fields = {"prompt": "abcdefgh", "truncate_prompt_tokens": 4, "truncation_side": side}
    answer, pool = ask(COMPLETIONS, **fields)
    assert answer.status_code == 200
    assert pool.prompt() == kept
    assert ask(COMPLETIONS, **{**fields, "truncation_side": "middle"})[0].json()["error"]["param"] == "truncation_side"


@pytest.mark.parametrize(("kind", "end"), [("enabled", "<think>"), ("adaptive", "<think>"), ("disabled", "")])
def test_thinking_is_handed_to_the_template(kind, end):
    answer, pool = ask(CHAT, thinking={"type": kind})
    assert answer.status_code == 200
    assert pool.prompt().endswith(f"<|assistant|>{end}")


def test_the_document_gives_each_field_its_outcome():
    table = DOCUMENT.read_text(encoding="utf-8").partition("| outcome | reason | fields |\n")[2].partition("\n\n")[0]
    found = [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]
    shown = [(name, outcome) for outcome, _, names in found for name in re.findall(r"`(\w+)`", names)]
    assert len(shown) == len(dict(shown))
    assert dict(shown) == {name: "refused" if rule.is_refused else "ignored" for name, rule in FOREIGN.items()}
