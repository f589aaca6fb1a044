"""Anthropic's client as it is installed from its package, unmodified, against the demo pair."""

import pytest

from tests.clients.conftest import MODEL
from tests.clients.test_python_clients import CITY, MESSAGES
from tests.needs import needs
from wingbeat.deployments.api.bodies.unserved_fields import WITHOUT_EFFECT
from wingbeat.deployments.api.messages_api.body import MessagesBody

pytestmark = [pytest.mark.clients, pytest.mark.slow]


@pytest.fixture
def client(url):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_messages_whole_streamed_and_counted(client):
    fields = {"model": MODEL, "messages": MESSAGES, "system": "Be kind."}
    whole = client.messages.create(**fields, max_tokens=16, extra_body={"temperature": 0})
    with client.messages.stream(**fields, max_tokens=16, extra_body={"temperature": 0}) as stream:
        assert stream.get_final_text() == whole.content[0].text
    counted = client.messages.count_tokens(**fields).input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


@needs("grammars")
def test_a_tool_that_must_be_used_and_its_result(client):
    tool = {"name": "weather", "description": "Weather.", "input_schema": CITY}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    fields = {"model": MODEL, "tools": [tool], "max_tokens": 150}
    with client.messages.stream(**fields, messages=MESSAGES, tool_choice=choice) as stream:
        got = stream.get_final_message()
    assert got.stop_reason == "tool_use"
    (use,) = [block for block in got.content if block.type == "tool_use"]
    assert use.input.keys() == {"city", "days"}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]}
    messages = [*MESSAGES, {"role": "assistant", "content": got.content}, result]
    assert client.messages.create(**{**fields, "max_tokens": 4}, messages=messages).stop_reason == "max_tokens"


def test_no_field_of_its_schema_is_unknown():
    schema = pytest.importorskip("anthropic.types.message_create_params")
    known = {*MessagesBody.model_fields, *MessagesBody.unserved, *WITHOUT_EFFECT}
    assert schema.MessageCreateParamsBase.__annotations__.keys() <= known


def test_errors_have_its_classes(client):
    anthropic = pytest.importorskip("anthropic")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", messages=MESSAGES, max_tokens=4)
