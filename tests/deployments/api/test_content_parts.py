"""Parts of contents that a model of text takes, and parts that it does not take."""

import pytest

from tests.deployments.http_world import FakePool, call
from wingbeat.deployments.api.bodies.chat_requests import ChatBody

URL = "data:image/png;base64,AAAA"
BODIES = {
    "/v1/chat/completions": ("messages", {"type": "image_url", "image_url": {"url": URL}}, {}),
    "/v1/responses": ("input", {"type": "input_image", "image_url": URL}, {}),
    "/v1/messages": (
        "messages",
        {"type": "image", "source": {"type": "url", "url": "https://a.test"}},
        {"max_tokens": 4},
    ),
}


def test_a_model_of_text_refuses_an_image_by_the_field_of_its_type():
    """Whether parts read images or not."""
    for path, (field, part, more) in BODIES.items():
        body = {field: [{"role": "user", "content": [part]}], "model": "demo"} | more
        got = call(FakePool(), path, body)
        if got.status_code == 404:  # the API is deleted
            continue
        assert got.status_code == 400, got.text
        error = got.json()["error"]
        if path != "/v1/messages":
            assert (error["param"], error["code"]) == (f"{field}[0].content[0].type", "unsupported_value")
        assert "not supported" in error["message"]


def test_a_list_of_types_promises_no_type_that_the_model_lacks():
    body = {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}
    message = call(FakePool(), "/v1/chat/completions", body).json()["error"]["message"]
    assert message.startswith("Content parts of type 'hologram' are not supported; only 'text' is")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_text", "text": "b"},
        {"type": "output_text", "text": "b", "annotations": []},
        {"type": "refusal", "refusal": "b"},
        {"type": "thinking", "thinking": "b", "closed": True},
    ],
    ids=lambda part: part["type"],
)
def test_a_part_of_text_is_read_under_every_name_that_vllm_accepts(part):
    content = [{"type": "text", "text": "a"}, part]
    assert ChatBody.of_fields({"messages": [{"role": "user", "content": content}]}).messages[0].content == "a\nb"


def test_a_part_without_its_text_is_refused_by_the_name_of_the_field():
    body = {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "b"}]}]}
    got = call(FakePool(), "/v1/chat/completions", body)
    assert (got.status_code, got.json()["error"]["param"]) == (400, "messages[0].content[0].refusal")
