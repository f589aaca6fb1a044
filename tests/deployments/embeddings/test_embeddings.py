"""`/v1/embeddings`: OpenAI's fields, over vectors pooled by the engines."""

import asyncio
import base64
import math
import struct
from typing import Any

import httpx
import openai
import pytest

from tests.deployments.http_world import TOKENIZER, FakePool, app_for, call
from wingbeat.deployments.embeddings.settings import EmbeddingKind
from wingbeat.deployments.fleet.interface import EngineUnavailable
from wingbeat.runtime.pooling.pooling import Pooling

MEAN, CUT = EmbeddingKind(Pooling.MEAN), EmbeddingKind(Pooling.LAST, can_be_cut=True)


def ask(pool: FakePool | None = None, kind: EmbeddingKind = MEAN, **fields: Any) -> httpx.Response:
    body = {"model": "demo", "input": "hi", **fields}
    return call(pool or FakePool(), "/v1/embeddings", body, of_parts={"embeddings": kind})


def unit(*numbers: float) -> list[float]:
    length = math.hypot(*numbers)
    return [number / length for number in numbers]


def test_each_input_has_its_embedding_of_length_one_in_order():
    pool = FakePool()
    texts = ["hi", "hello", "x"] * 3
    answer = ask(pool, input=texts).json()
    tokens = [TOKENIZER.encode(text, True) for text in texts]
    assert [one["index"] for one in answer["data"]] == list(range(9))
    for one, ids in zip(answer["data"], tokens, strict=True):
        assert one["object"] == "embedding"
        assert one["embedding"] == pytest.approx(unit(1.0, len(ids), sum(ids)), rel=1e-6)
    assert (answer["object"], answer["model"]) == ("list", "demo")
    assert answer["usage"] == {"prompt_tokens": sum(map(len, tokens)), "total_tokens": sum(map(len, tokens))}
    assert {(one.params.report, one.params.max_tokens, one.params.speculation) for one in pool.requests} == {
        (Pooling.MEAN, 1, False)
    }
    assert not pool.num_admitted


def test_more_inputs_than_an_engine_runs_take_its_places_in_turns():
    pool = FakePool()
    pool.max_requests = pool.max_num_seqs
    assert len(ask(pool, input=["x"] * 11).json()["data"]) == 11
    pool.max_requests = 1
    assert ask(pool, input=["x"] * 2).status_code == 503


@pytest.mark.parametrize("given", [[7, 8, 9], [[7, 8, 9]]])
def test_inputs_may_be_token_ids(given: list):
    pool = FakePool()
    (one,) = ask(pool, input=given).json()["data"]
    assert pool.requests[0].prompt_token_ids == (7, 8, 9)
    assert one["embedding"] == pytest.approx(unit(1.0, 3, 24), rel=1e-6)


def test_base64_has_the_same_numbers():
    numbers = ask().json()["data"][0]["embedding"]
    encoded = ask(encoding_format="base64").json()["data"][0]["embedding"]
    assert list(struct.unpack("<3f", base64.b64decode(encoded))) == pytest.approx(numbers, rel=1e-6)


def test_an_embedding_is_cut_where_the_model_was_trained_for_it():
    whole = ask(kind=CUT).json()["data"][0]["embedding"]
    assert ask(kind=CUT, dimensions=2).json()["data"][0]["embedding"] == pytest.approx(unit(*whole[:2]), rel=1e-6)
    for kind, dimensions in ((MEAN, 2), (CUT, 4)):
        refused = ask(kind=kind, dimensions=dimensions)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")


def test_a_long_input_is_refused_or_cut():
    refused = ask(input=[list(range(64))])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    pool = FakePool()
    assert ask(pool, input=[list(range(64))], truncate_prompt_tokens=-1).status_code == 200
    assert pool.requests[0].prompt_token_ids == tuple(range(1, 64))


def test_an_answer_that_is_too_long_is_refused_before_it_is_computed():
    pool, wide = FakePool(), EmbeddingKind(Pooling.MEAN, num_numbers=8192)
    refused = ask(pool, kind=wide, input=["x"] * 2048)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "answer_too_long")
    assert "max_answer_bytes" in refused.json()["error"]["message"]
    assert not pool.requests
    assert ask(pool, kind=wide, input=["x"] * 2048, encoding_format="base64").status_code == 400
    assert ask(pool, kind=wide, input=["x"] * 8).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["x", 3]}, "input"),
        ({"input": [[10**6]]}, "input"),
        ({"input": None}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(fields: dict, param: str):
    pool = FakePool()
    refused = ask(pool, **fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith(param)
    assert not pool.requests


def test_a_model_without_embeddings_says_how_it_gets_them():
    refused = ask(kind=EmbeddingKind())
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "embeddings" in refused.json()["error"]["message"]
    assert ask(model="other").status_code == 404


def test_one_that_fails_takes_the_others_with_it():
    pool = FakePool()
    pool.fail_after = (0, EngineUnavailable("gone"))
    assert ask(pool, input=["x"] * 3).status_code == 503
    assert not pool.num_admitted
    assert not pool.running


def test_openais_client_reads_it():
    transport = httpx.ASGITransport(app_for(FakePool(), of_parts={"embeddings": MEAN}))
    client = openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=httpx.AsyncClient(transport=transport)
    )

    async def embed() -> list[float]:
        return (await client.embeddings.create(model="demo", input="hi")).data[0].embedding

    assert asyncio.run(embed()) == pytest.approx(ask().json()["data"][0]["embedding"], rel=1e-6)
