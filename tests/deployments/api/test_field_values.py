"""Values that a field of OpenAI's schema cannot have are refused by the field's name."""

import json

import pytest

from tests.deployments.api.parsed_bodies import chat, completion, refused
from wingbeat.deployments.api.bodies.requests import CompletionBody
from wingbeat.deployments.api.errors import ApiError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length_penalty", 1.1),
        ("length_penalty", True),
        ("spaces_between_special_tokens", False),
        ("spaces_between_special_tokens", 1),
        ("use_beam_search", 0),
        ("guided_json", {}),
    ],
)
def test_zero_one_true_and_false_are_told_apart(field, value):
    for parse in (completion, chat):
        error = refused(parse, **{field: value})
        assert (error.param, error.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", ["a"]),
        ("bad_words", [""]),
        ("bad_words", "word"),
        ("min_tokens", -1),
        ("min_tokens", False),
        ("stop_token_ids", [1.5]),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", "no"),
        ("prompt_logprobs", 21),
        ("priority", 2**31),
        ("cache_salt", ""),
        ("truncate_prompt_tokens", -2),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "grammar": "b"}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"regex": "a" * 70000}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_object", "schema": {}}),
        ("response_format", {"type": "xml"}),
    ],
)
def test_values_that_a_field_cannot_have_are_named(field, value):
    for parse in (completion, chat):
        error = refused(parse, **{field: value})
        assert error.param.split(".")[0].split("[")[0] == field
        assert error.code in ("invalid_value", "invalid_type")


@pytest.mark.parametrize("field", ["response_format", "stream_options", "speculation", "logit_bias"])
def test_a_text_in_place_of_an_object_is_told_in_words_of_json(field):
    assert "object" in refused(completion, **{field: "json_object"}).message


def test_fields_that_contradict_each_other_are_named():
    assert refused(chat, top_logprobs=3).param == "top_logprobs"


@pytest.mark.parametrize("field", ["max_tokens", "n", "top_k", "seed", "min_tokens", "priority"])
def test_an_integer_may_be_written_with_a_fraction_of_zero(field):
    for parse in (completion, chat):
        assert type(getattr(parse(**{field: 3.0}), field)) is int
        assert refused(parse, **{field: 3.5}).code == "invalid_type"


def test_values_that_ask_for_nothing_are_accepted():
    completion(logprobs=None, suffix="", best_of=2, n=2, presence_penalty=0, frequency_penalty=0.0, logit_bias={})
    completion(stream_options={"include_usage": False}, stream=False)
    completion(user="u", metadata={"k": "v"}, echo=False, top_k=-1)
    chat(logprobs=False, top_logprobs=0, tools=[], tool_choice="auto", response_format={"type": "text"})
    chat(modalities=["text"], reasoning_effort="none", store=False, parallel_tool_calls=True, user="u")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 2**63}, "top_k"),
        ({"top_k": 10**4000}, "top_k"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"stop": "x" * 1025}, "stop"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", None]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"speculation": {"enabled": "no"}}, "speculation.enabled"),
        ({"speculation": True}, "speculation"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"model": 3}, "model"),
        ({"guided_json": {}}, "guided_json"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
def test_wrong_values_are_named(fields, param):
    error = refused(completion, **fields)
    assert error.param == param
    assert error.message.count("\n") == 0


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "x", "name": "f"}], "messages[0].role"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{}]}],
            "messages[1].tool_calls[0].function",
        ),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_messages_are_checked_part_by_part(messages, param):
    assert refused(chat, messages=messages).param == param


def test_a_refused_content_part_is_named():
    assert "'input_file'" in refused(chat, messages=[{"role": "user", "content": [{"type": "input_file"}]}]).message


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "a\nb"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b'{"model": "m", "prompt": "\\ud800"}', b"\xff", b'{"model": "m", "temperature": NaN}'],
)
def test_malformed_json_is_refused(body):
    with pytest.raises(ApiError) as caught:
        CompletionBody.parse(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("number", [b"1e999", b"-1e999"])
def test_numbers_beyond_floats_are_refused(number):
    with pytest.raises(ApiError) as caught:
        CompletionBody.parse(b'{"model": "m", "prompt": "a", "temperature": ' + number + b"}")
    assert caught.value.param == "temperature"


def test_missing_fields_are_named():
    with pytest.raises(ApiError) as caught:
        CompletionBody.parse(b'{"model": "m"}')
    assert (caught.value.param, caught.value.code) == ("prompt", "missing_required_parameter")


def test_a_wrong_value_is_not_sent_back_whole():
    for fields in ({"messages": [{"role": "x" * 9999, "content": "x"}]}, {"messages": [{"x" * 9999: 1}]}):
        assert len(refused(chat, **fields).message) < 400


def test_what_is_just_allowed_is_taken():
    most = completion(top_k=2**31 - 1, max_tokens=2**31 - 1, stop=["x" * 1024] * 16)
    assert (most.top_k, most.max_tokens) == (2**31 - 1, 2**31 - 1)
    assert chat(max_completion_tokens=2**31 - 1).asked_max_tokens == 2**31 - 1
    assert refused(chat, max_completion_tokens=2**31).param == "max_completion_tokens"


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_all_four_kinds_of_prompt_are_accepted(prompt):
    is_single = isinstance(prompt, str) or isinstance(prompt[0], int)
    assert completion(prompt=prompt).prompt == ([prompt] if is_single else prompt)


def test_both_names_of_the_limit_agree_or_are_refused():
    assert chat(max_completion_tokens=5).asked_max_tokens == 5
    assert chat(max_tokens=6).asked_max_tokens == 6
    assert chat(max_tokens=7, max_completion_tokens=7).asked_max_tokens == 7
    assert refused(chat, max_tokens=7, max_completion_tokens=8).param == "max_tokens"
