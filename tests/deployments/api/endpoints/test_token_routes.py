"""Tokens of texts and conversations, and texts of tokens."""

import pytest

from tests.deployments.http_world import call
from tests.deployments.tool_world import PARSERS, TOKENIZER, USER, WEATHER, ToolPool, chat, post


def ask(path: str, **body) -> dict:
    response = post(ToolPool(), path, body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_text_becomes_tokens_and_they_become_the_text():
    got = ask("/tokenize", prompt="héllo", model="demo", return_token_strs=True)
    assert got["tokens"] == TOKENIZER.encode("héllo")
    assert (got["count"], got["max_model_len"], len(got["token_strs"])) == (6, 8192, 6)
    assert ask("/tokenize", prompt="", add_special_tokens=False)["tokens"] == []
    assert ask("/tokenize", prompt="x")["token_strs"] is None
    assert ask("/detokenize", tokens=got["tokens"])["prompt"] == "héllo"


def test_special_tokens_are_part_of_the_text_of_tokens():
    assert ask("/detokenize", tokens=[0])["prompt"] == "<eos>"


@pytest.mark.parametrize(
    "fields",
    [{}, {"tools": [WEATHER]}, {"continue_final_message": True}, {"chat_template_kwargs": {"enable_thinking": True}}],
)
def test_a_conversation_has_the_tokens_that_a_chat_request_runs_with(fields):
    pool = ToolPool("x")
    assert chat(pool, **fields).status_code == 200
    got = ask("/tokenize", messages=[USER], **fields)
    assert tuple(got["tokens"]) == pool.requests[0].prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [USER], "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(path, body, param):
    response = post(ToolPool(), path, body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_the_tokenizer_tells_its_special_tokens_and_template():
    got = call(ToolPool(), "/tokenizer_info", method="GET", tokenizer=TOKENIZER, parsers=PARSERS).json()
    assert (got["eos_token"], got["vocab_size"]) == ("<eos>", 257)
    assert got["added_tokens_decoder"]["0"] == {"content": "<eos>", "special": True}
    assert "<tool_call>" in got["chat_template"]
