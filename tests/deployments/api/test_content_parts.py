"""Parts of contents that a model of text does not take."""

from tests.deployments.http_world import FakePool, call

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
