"""The oracle says what docs/http_api.md says, and the checks of an answer see what is wrong with it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.optional import is_gone

from .answers import Wrong, check
from .client import Answer, completion
from .contract import CHAT_NO_OPS, COMPLETION_NO_OPS, MODEL, NO_OPS
from .generator import draw
from .oracle import judge

DOCUMENT = Path(__file__).parents[2] / "docs" / "http_api.md"


class Words:
    """A tokenizer with a token for every word."""

    def encode(self, text: str) -> list[int]:
        return [1] * max(1, len(text.split()))

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(" ".join(message["content"] for message in messages))

    def decode(self, token_ids: list[int]) -> str:
        return "w " * len(token_ids)


def test_the_table_of_unserved_fields_is_the_documents():
    table = r"in\s+brackets:(.*?)The\s+tables\s+above"
    text = re.search(table, DOCUMENT.read_text(), re.S)[1]
    listed = set(re.findall(r"`([a-z_]+)`", text.partition("and in messages")[0]))
    ours = {*NO_OPS, *COMPLETION_NO_OPS, *CHAT_NO_OPS}
    assert {name for name in listed if not is_gone(name)} == {name for name in ours if not is_gone(name)}


@pytest.mark.slow
def test_every_code_the_oracle_knows_is_in_the_document():
    codes = {outcome.code for index in range(2000) for outcome in judge(draw(0, index), Words()).outcomes}
    assert len(codes) > 14
    assert all(f"`{code}`" in DOCUMENT.read_text() for code in codes)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"prompt": "x", "max_tokens": 1}', 200, None),
        (b'{"prompt": "x", "max_tokens": 0, "echo": true}', 200, None),
        (b'{"prompt": "x", "max_tokens": 0}', 400, "invalid_value"),
        (b'{"prompt": "x", "n": 1, "n": 1}', 400, "invalid_json"),
        (b'{"prompt": "x", "temperature": NaN}', 400, "invalid_json"),
        (b'{"prompt": "\xff"}', 400, "invalid_json"),
        (b'{"prompt": ' + b"[" * 80 + b"1" + b"]" * 80 + b"}", 400, "invalid_json"),
        (b'{"prompt": "x", "colour": 1}', 200, None),
        (b'{"prompt": "x", "use_beam_search": true}', 400, "unsupported_parameter"),
        (b'{"prompt": "x", "logit_bias": {"1": 2, "4095": -100}}', 200, None),
        (b'{"prompt": "x", "logit_bias": {"1e3": 2}}', 400, "invalid_value"),
        (b'{"prompt": "x", "logit_bias": {"4096": 2}}', 400, "invalid_value"),
        (b'{"prompt": "x", "frequency_penalty": false}', 400, "invalid_type"),
        (b'{"prompt": "x", "frequency_penalty": -2.5}', 400, "invalid_value"),
        (b'{"prompt": "x", "min_tokens": 17}', 400, "invalid_value"),
        (b'{"prompt": "x", "logprobs": false}', 200, None),
        (b'{"prompt": "x", "logprobs": true}', 400, "invalid_type"),
        (b'{"prompt": "x", "structured_outputs": {"regex": "("}}', 400, "invalid_value"),
        (b'{"prompt": "x", "structured_outputs": {"regex": "yes|no"}}', 200, None),
        (b'{"prompt": "x", "truncate_prompt_tokens": 0}', 400, "invalid_value"),
        (b'{"prompt": "x", "frequency_penalty": -0.0}', 200, None),
        (b'{"prompt": "x", "n": true}', 400, "invalid_type"),
        (b'{"prompt": "x", "stop": ["1", ""]}', 400, "invalid_value"),
        (b'{"prompt": [1, 4096]}', 400, "invalid_value"),
        (b'{"prompt": "x", "max_tokens": 2048}', 400, "context_length_exceeded"),
        (b'{"prompt": "x", "n": 16, "max_tokens": 1300, "logprobs": 20}', 400, "answer_too_long"),
        (b'{"prompt": "x", "n": 16, "max_tokens": 1300, "logprobs": 20, "stream": true}', 200, None),
        (b'{"prompt": "x", "model": "gpt-4o"}', 404, "model_not_found"),
        (b'{"max_tokens": 1}', 400, "missing_required_parameter"),
    ],
)
def test_a_body_has_the_verdict_of_the_document(body, status, code):
    verdict = judge(replace(completion(), body=body), Words())
    if status == 200:
        assert verdict.statuses == {200}
    else:
        assert not verdict.statuses
        assert (status, code) in {(outcome.status, outcome.code) for outcome in verdict.outcomes}


def test_the_first_broken_rule_is_the_one_that_is_answered():
    case = replace(completion(), body=b"no JSON")
    headers = dict(case.headers)
    for name, value, code in (
        ("Content-Type", "text/plain", "unsupported_media_type"),
        ("X-Request-Id", "x" * 129, "invalid_header"),
        ("Authorization", "Bearer guess", "invalid_api_key"),
        ("Origin", "http://evil.example", "origin_not_allowed"),
        ("Host", "evil.example", "host_not_allowed"),
    ):
        headers[name] = value
        verdict = judge(replace(case, headers=tuple(headers.items())), Words())
        assert not verdict.statuses
        assert {outcome.code for outcome in verdict.outcomes} == {code}


USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}


LOGPROBS = {
    "tokens": ["a", " b"],
    "token_logprobs": [-0.5, -1.0],
    "top_logprobs": [{"a": -0.5}, {"c": -0.1, " b": -1.0}],
    "text_offset": [0, 1],
}
CHOICE = {"index": 0, "text": "a b", "finish_reason": "length", "stop_reason": None, "logprobs": LOGPROBS}


def answer(**changes) -> Answer:
    choice = CHOICE
    metrics = {"speculative_decoding": {"num_drafts": 0}}
    body = {
        "object": "text_completion",
        "model": MODEL,
        "seed": 7,
        "choices": [choice],
        "usage": USAGE,
        "metrics": metrics,
    }
    return Answer(200, [("x-request-id", "1")], json.dumps(body | changes).encode(), complete=True)


def test_a_good_answer_is_taken():
    case = completion(prompt="x", max_tokens=2, seed=7, logprobs=1)
    assert check(case, judge(case, Words()), answer()).texts == ["a b"]


@pytest.mark.parametrize("prompt", ["w w ", [1, 2]], ids=["text", "tokens"])
def test_a_stop_string_may_stand_in_the_prompt_that_is_echoed_and_nowhere_else(prompt):
    case = completion(prompt=prompt, max_tokens=2, seed=7, stop="w", echo=True)
    ended = {"index": 0, "finish_reason": "stop", "stop_reason": None}
    choices = [{**ended, "text": text} for text in ("w w a b", "w w a w", "a b")]
    usage = USAGE | {"prompt_tokens": 2, "total_tokens": 4}
    verdict = judge(case, Words())
    assert check(case, verdict, answer(usage=usage, choices=choices[:1])).texts == ["w w a b"]
    for choice in choices[1:]:
        with pytest.raises(Wrong):
            check(case, verdict, answer(usage=usage, choices=[choice]))


def test_a_prompt_that_is_echoed_alone_has_nothing_behind_it():
    case = completion(prompt="w w ", max_tokens=0, seed=7, echo=True)
    usage = USAGE | {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
    good = {"index": 0, "text": "w w ", "finish_reason": "length", "stop_reason": None}
    verdict = judge(case, Words())
    assert check(case, verdict, answer(usage=usage, choices=[good])).texts == ["w w "]
    written = usage | {"completion_tokens": 1, "total_tokens": 3}
    for choice, told in ((good, written), (good | {"text": "w w a"}, usage), (good | {"finish_reason": "stop"}, usage)):
        with pytest.raises(Wrong):
            check(case, verdict, answer(usage=told, choices=[choice]))


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 8},
        {"model": "another"},
        {"choices": []},
        {"choices": [CHOICE | {"text": "a stop"}]},
        {"choices": [CHOICE | {"finish_reason": None}]},
        {"choices": [CHOICE | {"stop_reason": "stop"}]},
        {"choices": [CHOICE | {"token_ids": [1, 2]}]},
        {"choices": [CHOICE | {"logprobs": None}]},
        {"choices": [CHOICE | {"logprobs": LOGPROBS | {"token_logprobs": [-0.5, 0.5]}}]},
        {"choices": [CHOICE | {"logprobs": LOGPROBS | {"top_logprobs": [{"a": -0.5}, {"c": -1.0}]}}]},
        {"choices": [CHOICE | {"logprobs": LOGPROBS | {"text_offset": [0, 2]}}]},
        {"choices": [CHOICE | {"logprobs": {name: values[:1] for name, values in LOGPROBS.items()} | {"tokens": []}}]},
        {"usage": USAGE | {"total_tokens": 4}},
        {"usage": USAGE | {"prompt_tokens": 2, "total_tokens": 4}},
        {"usage": USAGE | {"completion_tokens": 3, "total_tokens": 4}},
        {"metrics": {"speculative_decoding": {"num_drafts": 1}}},
    ],
    ids=str,
)
def test_a_wrong_answer_is_seen(changes):
    case = completion(prompt="x", max_tokens=2, seed=7, stop="stop", logprobs=1, speculation={"enabled": False})
    check(case, judge(case, Words()), answer())
    with pytest.raises(Wrong):
        check(case, judge(case, Words()), answer(**changes))


def test_a_success_where_an_error_is_demanded_is_seen():
    case = completion(prompt="x", top_p=0)
    with pytest.raises(Wrong, match="without an error's body"):
        check(case, judge(case, Words()), answer())
