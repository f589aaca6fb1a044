"""Bodies that clients were seen to send, byte for byte, are answered in the shape that these clients read.

`recorded/` holds the bodies; `docs/clients.md` says of which version each is.
"""

import json
from pathlib import Path

import pytest

from tests.deployments.http_world import call
from tests.deployments.tool_world import CALL, PARSERS, TOKENIZER, ToolPool
from tests.needs import needs

RECORDED = Path(__file__).parent / "recorded"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES = "/v1/responses"
PATHS = {
    "vllm_bench_completions": COMPLETIONS,
    "vllm_bench_chat": CHAT,
    "guidellm_completions": COMPLETIONS,
    "guidellm_chat": CHAT,
    "aiperf_completions": COMPLETIONS,
    "aiperf_chat": CHAT,
    "aiperf_responses": RESPONSES,
    "sglang_bench_completions": COMPLETIONS,
    "sglang_bench_chat": CHAT,
    "langchain_chat": CHAT,
    "langchain_stream": CHAT,
    "langchain_tools": CHAT,
    "langchain_auto_tools": CHAT,
    "langchain_tool_result": CHAT,
    "langchain_schema": CHAT,
    "litellm_chat": CHAT,
    "litellm_stream": CHAT,
    "instructor_tools": CHAT,
    "pydantic_ai_tools": CHAT,
    "llm_stream": CHAT,
    "llm_chat": CHAT,
    "lm_eval_generate": COMPLETIONS,
    "lm_eval_tokenize": "/tokenize",
    "lm_eval_detokenize": "/detokenize",
}
NEEDS_LOGPROBS = {"lm_eval_loglikelihood": COMPLETIONS}
"""Log-probabilities come of an engine: `tests/clients` sends these."""
HEADERS = {
    "vllm_bench": {"x-request-id": "bench-0f3a-1", "Authorization": "Bearer EMPTY"},
    "aiperf": {"X-Request-ID": "0b9f", "X-Correlation-ID": "77aa", "Accept": "text/event-stream"},
}
TEXT = "hello world and more"


def send(name: str, pool: ToolPool):
    client = name.rpartition("_")[0]
    headers = {"Content-Type": "application/json", **HEADERS.get(client, {})}
    body = (RECORDED / f"{name}.json").read_bytes()
    return call(pool, PATHS[name], body, headers=headers, tokenizer=TOKENIZER, parsers=PARSERS)


def stream(response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_every_recorded_body_is_sent():
    recorded = {path.stem for path in RECORDED.glob("*.json")}
    assert recorded == {*PATHS, *NEEDS_LOGPROBS}


@pytest.mark.few(8)
@pytest.mark.parametrize(("name", "path"), PATHS.items(), ids=PATHS)
def test_a_recorded_body_is_answered(name, path):
    answer = CALL if "tools" in name else TEXT
    response = send(name, ToolPool(answer))
    assert response.status_code == 200, response.text


STREAMS = [name for name in PATHS if name.startswith(("vllm_bench", "guidellm", "aiperf_c"))]


@pytest.mark.parametrize("name", STREAMS)
def test_streams_end_in_a_usage_chunk_with_the_figures_of_speculation(name):
    chunks = stream(send(name, ToolPool(TEXT)))
    *texts, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 16
    assert last["metrics"]["speculative_decoding"] is not None
    pieces = [chunk["choices"][0] for chunk in texts]
    key = "text" if PATHS[name] == COMPLETIONS else None
    assert "".join(piece[key] if key else piece["delta"].get("content") or "" for piece in pieces) == TEXT[:16]
    assert pieces[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["guidellm_completions", "guidellm_chat", "aiperf_chat"])
def test_every_chunk_has_the_usage_so_far_where_it_is_asked_for(name):
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream(send(name, ToolPool(TEXT)))]
    assert counts == sorted(counts)
    assert counts[-1] == 16


@needs("parsing")
@pytest.mark.parametrize(
    ("name", "function"),
    [("langchain_tools", "weather"), ("instructor_tools", "City"), ("pydantic_ai_tools", "final_result")],
)
def test_a_function_that_must_be_called_is_the_form_of_the_answer(name, function):
    pool = ToolPool(CALL)
    answer = send(name, pool).json()["choices"][0]["message"]
    assert answer["tool_calls"][0]["type"] == "function"
    assert f'\\"name\\": \\"{function}\\"' in pool.requests[0].params.grammar.text


@needs("grammars")
def test_a_schema_is_the_form_of_the_answer():
    pool = ToolPool("{}")
    assert send("langchain_schema", pool).status_code == 200
    assert '"rivers"' in pool.requests[0].params.grammar.text


@needs("parsing")
def test_a_call_and_its_result_that_are_sent_back_reach_the_template():
    pool = ToolPool("It is sunny.")
    assert send("langchain_tool_result", pool).json()["choices"][0]["message"]["content"] == "It is sunny."
    assert pool.prompt().endswith("<|tool|>[call_1]sunny<|end|><|assistant|>")


def test_a_benchmarks_request_id_comes_back():
    assert send("vllm_bench_completions", ToolPool(TEXT)).headers["x-request-id"] == "bench-0f3a-1"
