"""OpenAI's client of the Responses API as it is installed from its package, unmodified, against the demo pair."""

import json

import pytest

from tests.clients.conftest import MODEL
from tests.clients.test_python_clients import TOOL, City
from tests.needs import needs

pytestmark = [pytest.mark.clients, pytest.mark.slow]


@pytest.fixture
def client(url):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@needs("grammars")
def test_responses_whole_streamed_and_with_a_tool(client):
    fields = {"model": MODEL, "input": "def main(", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    called = client.responses.create(
        model=MODEL,
        input="x",
        tools=[tool],
        tool_choice="required",
        max_output_tokens=150,
        parallel_tool_calls=False,
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Paris", "Oslo")


@needs("grammars")
def test_a_schema_of_a_response(client):
    got = client.responses.parse(model=MODEL, input="x", text_format=City, max_output_tokens=150, temperature=0)
    assert isinstance(got.output_parsed, City)
