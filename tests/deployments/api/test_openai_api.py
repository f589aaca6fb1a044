"""Every field of OpenAI's schema is honoured, without effect on the result, or passed over or refused by name."""

import json

import openai.types.chat.completion_create_params as chat_schema
import openai.types.completion_create_params as completion_schema
import pytest

from tests.deployments.api.parsed_bodies import CHAT, COMPLETION, chat, completion, refused
from tests.optional import is_gone
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.requests import CompletionBody
from wingbeat.deployments.api.bodies.unserved_fields import WITHOUT_EFFECT


@pytest.mark.parametrize(
    ("body", "schema", "minimal"),
    [
        (CompletionBody, completion_schema.CompletionCreateParamsBase, COMPLETION),
        (ChatBody, chat_schema.CompletionCreateParamsBase, CHAT),
    ],
    ids=["completions", "chat"],
)
def test_no_field_of_the_openai_schema_is_unknown(body, schema, minimal):
    known = set(body.model_fields) | set(body.unserved) | WITHOUT_EFFECT
    assert {name for name in schema.__annotations__ if not is_gone(name)} <= known
    assert body.parse(json.dumps({**minimal, **dict.fromkeys(known - minimal.keys())}).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("best_of", 2),
        ("stream_options", {"include_usage": True, "include_obfuscation": True}),
    ],
)
def test_completions_refuse_what_is_not_served(field, value):
    error = refused(completion, **{field: value, "stream": True})
    assert error.param.split(".")[0] == field
    assert error.param in error.message
    assert error.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("moderation", {}),
    ],
)
def test_chat_refuses_what_is_not_served(field, value):
    error = refused(chat, **{field: value})
    assert (error.param, error.code) == (field, "unsupported_parameter")


ASKS_FOR_NOTHING = {
    "frequency_penalty": [0, 0.0],
    "presence_penalty": [0, 0.0],
    "repetition_penalty": [1, 1.0],
    "length_penalty": [1, 1.0],
    "logit_bias": [{}],
    "logprobs": [False],
    "min_tokens": [0],
    "stop_token_ids": [[]],
    "bad_words": [[]],
    "include_stop_str_in_output": [False],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "add_special_tokens": [True],
    "return_token_ids": [False],
    "return_tokens_as_token_ids": [False],
    "priority": [0],
    "use_beam_search": [False],
    "response_format": [{"type": "text"}],
    "best_of": [1],
}
CHAT_ASKS_FOR_NOTHING = {
    "echo": [False],
    "add_generation_prompt": [True],
    "continue_final_message": [False],
    "chat_template_kwargs": [{}],
    "documents": [[]],
    "include_reasoning": [True],
    "top_logprobs": [0],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "modalities": [["text"]],
    "reasoning_effort": ["none"],
    "verbosity": ["medium"],
    "service_tier": ["auto", "default"],
    "store": [False],
}
ONLY_NULL = [
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "logits_processors",
    "kv_transfer_params",
    "vllm_xargs",
]


@pytest.mark.parametrize(("field", "values"), ASKS_FOR_NOTHING.items())
def test_fields_of_other_servers_pass_where_they_ask_for_nothing(field, values):
    for value in [None, *values]:
        assert completion(**{field: value})
        assert chat(**{field: value})


@pytest.mark.parametrize(("field", "values"), CHAT_ASKS_FOR_NOTHING.items())
def test_fields_of_other_chat_servers_pass_where_they_ask_for_nothing(field, values):
    for value in [None, *values]:
        assert chat(**{field: value})


@pytest.mark.parametrize("field", ONLY_NULL)
def test_fields_that_always_ask_for_something_pass_as_null_alone(field):
    assert completion(**{field: None})
    assert chat(**{field: None})
    for parse in (completion, chat):
        assert refused(parse, **{field: {"a": 1}}).code == "unsupported_parameter"
