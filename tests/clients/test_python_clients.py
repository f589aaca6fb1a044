"""Clients as they are installed from their packages, unmodified, against the demo pair.

The demo model knows no tools and no schemas: what it answers in their form, the grammar made it write.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.clients.conftest import MODEL
from tests.needs import needs

pytestmark = [pytest.mark.clients, pytest.mark.slow]
MESSAGES = [{"role": "user", "content": "def main("}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": CITY}}


class City(BaseModel):
    """Schema that clients with pydantic request; without further properties, which the model may write without end."""

    model_config = ConfigDict(extra="forbid")
    capital: bool
    rivers: Literal[0, 1, 2]


class TestOpenAI:
    @pytest.fixture
    def client(self, url):
        openai = pytest.importorskip("openai")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client

    def test_completions_with_logprobs(self, client):
        fields = {"model": MODEL, "prompt": "import os\n", "max_tokens": 8, "temperature": 0}
        whole = client.completions.create(**fields, logprobs=2)
        assert whole.usage.completion_tokens == 8
        assert len(whole.choices[0].logprobs.token_logprobs) == 8
        text = "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True))
        assert text == whole.choices[0].text

    def test_chat_with_logprobs(self, client):
        got = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
        )
        tokens = got.choices[0].logprobs.content
        assert "".join(token.token for token in tokens) == got.choices[0].message.content
        assert {len(token.top_logprobs) for token in tokens} == {2}

    @needs("grammars")
    @needs("parsing")
    def test_tools_whole_and_streamed(self, client):
        fields = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "seed": 3, "max_tokens": 150}
        got = client.chat.completions.create(**fields, tool_choice="required", parallel_tool_calls=False)
        (call,) = got.choices[0].message.tool_calls
        assert json.loads(call.function.arguments).keys() == {"city", "days"}
        with client.chat.completions.stream(**fields, tool_choice="required", parallel_tool_calls=False) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
        assert final.choices[0].finish_reason == "tool_calls"

    @needs("grammars")
    def test_a_schema_parsed_by_the_client(self, client):
        got = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=City, max_tokens=150, seed=1
        )
        assert isinstance(got.choices[0].message.parsed, City)


class TestLangchain:
    @pytest.fixture
    def model(self, url):
        langchain = pytest.importorskip("langchain_openai")
        return langchain.ChatOpenAI(
            base_url=f"{url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=150, max_retries=0, seed=1
        )

    def test_it_invokes_and_streams(self, model):
        whole = model.bind(max_tokens=12).invoke("def main(")
        pieces = [piece.content for piece in model.bind(max_tokens=12).stream("def main(")]
        assert "".join(pieces) == whole.content
        assert whole.usage_metadata["output_tokens"] == 12

    @needs("grammars")
    @needs("parsing")
    def test_it_binds_tools_and_sends_their_results(self, model):
        messages = pytest.importorskip("langchain_core.messages")
        bound = model.bind_tools([TOOL], tool_choice="weather", parallel_tool_calls=False)
        called = bound.invoke("def main(")
        (call,) = called.tool_calls
        assert call["args"].keys() == {"city", "days"}
        history = [messages.HumanMessage("x"), called, messages.ToolMessage("sunny", tool_call_id=call["id"])]
        assert model.bind(max_tokens=4).invoke(history).response_metadata["finish_reason"] == "length"

    @needs("grammars")
    @needs("parsing")
    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_it_gets_structured_output(self, model, method):
        assert isinstance(model.with_structured_output(City, method=method).invoke("x"), City)

    def test_it_reads_logprobs(self, model):
        got = model.bind(logprobs=True, top_logprobs=2, max_tokens=4).invoke("x")
        assert len(got.response_metadata["logprobs"]["content"]) == 4


class TestLitellm:
    @pytest.fixture
    def complete(self, url, monkeypatch):
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        litellm = pytest.importorskip("litellm")
        fixed = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "messages": MESSAGES}
        return lambda **fields: litellm.completion(**fixed, **fields)

    def test_it_completes_and_streams(self, complete):
        whole = complete(max_tokens=12, temperature=0)
        pieces = complete(max_tokens=12, temperature=0, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content

    @needs("grammars")
    @needs("parsing")
    def test_it_calls_tools(self, complete):
        pytest.importorskip("mcp", reason="litellm imports it where there are tools")
        got = complete(tools=[TOOL], tool_choice="required", max_tokens=150, seed=2)
        assert json.loads(got.choices[0].message.tool_calls[0].function.arguments).keys() == {"city", "days"}


@needs("grammars")
@needs("parsing")
class TestInstructor:
    @pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
    def test_it_gets_a_model_of_pydantic(self, url, mode):
        instructor = pytest.importorskip("instructor")
        openai = pytest.importorskip("openai")
        raw = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        client = instructor.from_openai(raw, mode=getattr(instructor.Mode, mode))
        got = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_model=City, max_retries=0, seed=1)
        assert isinstance(got, City)


@needs("parsing")
class TestPydanticAI:
    def test_an_agent_gets_a_model_of_pydantic(self, url):
        ai = pytest.importorskip("pydantic_ai")
        models = pytest.importorskip("pydantic_ai.models.openai")
        providers = pytest.importorskip("pydantic_ai.providers.openai")
        provider = providers.OpenAIProvider(base_url=f"{url}/v1", api_key="none")
        agent = ai.Agent(models.OpenAIChatModel(MODEL, provider=provider), output_type=City)
        assert isinstance(agent.run_sync("x", model_settings={"max_tokens": 150, "seed": 1}).output, City)


class TestLlm:
    def test_the_command_answers(self, url, tmp_path: Path):
        pytest.importorskip("llm")
        model = {"model_id": "demo", "model_name": MODEL, "api_base": f"{url}/v1"}
        # A file of JSON is one of YAML.
        (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
        command = [sys.executable, "-m", "llm", "-m", "demo", "def main(", "-o", "max_tokens", "12"]
        for more in ([], ["--no-stream"]):
            done = subprocess.run([*command, *more], env=environment, check=False, capture_output=True, timeout=120)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()


def test_a_recorded_loglikelihood_request_of_lm_eval_brings_what_it_sums_up(url):
    httpx = pytest.importorskip("httpx")
    recorded = Path(__file__).parents[1] / "deployments" / "clients" / "recorded" / "lm_eval_loglikelihood.json"
    body = recorded.read_bytes().replace(b'"demo"', f'"{MODEL}"'.encode())
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=60).json()
    for choice, prompt in zip(answer["choices"], json.loads(body)["prompt"], strict=True):
        found = choice["logprobs"]
        assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(prompt) + 1
        # Its sum leaves out the first token, which nothing precedes, and the one that was generated.
        for logprob, top in zip(found["token_logprobs"][1:-1], found["top_logprobs"][1:-1], strict=True):
            assert logprob <= max(top.values()) <= 0
