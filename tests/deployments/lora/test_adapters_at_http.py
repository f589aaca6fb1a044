"""LoRA adapters over HTTP: named by `model` on every endpoint, loaded and unloaded by operators, vLLM's way."""

import asyncio

import pytest
from pydantic import SecretStr

from tests.deployments.http_world import FakePool, call, chat, chunks, complete
from tests.deployments.lora.adapter_pool import SERVED, AdapterPool
from wingbeat.deployments.api.access import Access
from wingbeat.runtime.scheduling.request import Variant

SQL = Variant("sql", "/adapters/sql", "d1")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MESSAGES = [{"role": "user", "content": "hi"}]
ENDPOINTS = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}


@pytest.fixture
def pool() -> AdapterPool:
    made = AdapterPool()
    made.adapters.catalog.put("sql", SQL)
    return made


def load(pool: FakePool, **fields):
    return call(pool, LOAD, fields, of_parts=SERVED)


def unload(pool: FakePool, **fields):
    return call(pool, UNLOAD, fields, of_parts=SERVED)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_model_is_the_base_model_an_adapter_or_unknown(pool, path):
    answers = {name: call(pool, path, {"model": name, **ENDPOINTS[path]}) for name in ("demo", "sql", "python")}
    assert [answer.status_code for answer in answers.values()] == [200, 200, 404]
    assert answers["python"].json()["error"]["code"] == "model_not_found"
    if "model" in answers["demo"].json():
        assert [answers[name].json()["model"] for name in ("demo", "sql")] == ["demo", "sql"]


def test_engines_are_told_the_adapter_of_each_request(pool):
    for name in ("sql", "demo", None):
        complete(pool, model=name, n=2)
    chat(pool, model="sql")
    assert [request.variant for request in pool.requests] == [SQL, SQL, None, None, None, None, SQL]


def test_every_chunk_of_a_stream_names_the_adapter(pool):
    assert {chunk["model"] for chunk in chunks(complete(pool, model="sql", stream=True))} == {"sql"}


def test_models_are_the_base_model_and_the_adapters_with_their_parent(pool):
    cards = call(pool, "/v1/models", method="GET").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("demo", None), ("sql", "demo")]
    assert [card["root"] for card in cards] == ["demo", "demo"]
    assert call(pool, "/v1/models/sql", method="GET").json() == cards[1]
    assert call(pool, "/v1/models/python", method="GET").status_code == 404


def test_an_adapter_is_served_from_its_loading_to_its_unloading():
    pool = AdapterPool()
    assert complete(pool, model="new").status_code == 404
    loaded = load(pool, lora_name="new", lora_path="good")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert complete(pool, model="new").status_code == 200
    assert pool.requests[-1].variant == Variant("new", "good", "digest of good")
    removed = unload(pool, lora_name="new", lora_int_id=3)
    assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert complete(pool, model="new").status_code == 404
    assert pool.files.unloaded == ["digest of good"]


def test_a_name_is_taken_until_it_is_replaced_in_place():
    pool = AdapterPool()
    load(pool, lora_name="new", lora_path="good")
    again = load(pool, lora_name="new", lora_path="other")
    assert again.status_code == 400
    assert again.json()["error"]["param"] == "lora_name"
    assert load(pool, lora_name="new", lora_path="other", load_inplace=True).status_code == 200
    complete(pool, model="new")
    assert pool.requests[-1].variant.digest == "digest of other"
    assert pool.files.unloaded == ["digest of good"]


def test_files_that_another_name_still_has_are_kept():
    pool = AdapterPool()
    for name in ("one", "two"):
        load(pool, lora_name=name, lora_path="good")
    unload(pool, lora_name="one")
    assert pool.files.unloaded == []


@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "code"),
    [
        (LOAD, {"lora_name": "new"}, 400, "lora_path", "missing_required_parameter"),
        (LOAD, {"lora_path": "good"}, 400, "lora_name", "missing_required_parameter"),
        (LOAD, {"lora_name": 3, "lora_path": "good"}, 400, "lora_name", "invalid_type"),
        (LOAD, {"lora_name": "", "lora_path": "good"}, 400, "lora_name", "invalid_value"),
        (LOAD, {"lora_name": " a", "lora_path": "good"}, 400, "lora_name", "invalid_value"),
        (LOAD, {"lora_name": "demo", "lora_path": "good"}, 400, "lora_name", "invalid_value"),
        (LOAD, {"lora_name": "new", "lora_path": "bad"}, 400, "lora_path", "invalid_value"),
        (LOAD, {"lora_name": "new", "lora_path": "good", "rank": 3}, 400, "rank", "unknown_parameter"),
        (UNLOAD, {"lora_name": "new"}, 404, "lora_name", "model_not_found"),
        (UNLOAD, {"lora_name": "demo"}, 404, "lora_name", "model_not_found"),
        (UNLOAD, {}, 400, "lora_name", "missing_required_parameter"),
    ],
)
def test_what_is_wrong_is_refused_by_the_fields_name(path, fields, status, param, code):
    answer = call(AdapterPool(), path, fields, of_parts=SERVED)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)


def test_without_the_setting_there_are_no_such_paths(pool):
    for path in (LOAD, UNLOAD):
        answer = call(pool, path, {"lora_name": "sql", "lora_path": "good"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


def test_an_operators_key_opens_them_and_a_clients_does_not():
    access = Access(api_keys=(SecretStr("client"),), operator_keys=(SecretStr("operator"),))
    for key, status in (("client", 401), ("operator", 200)):
        headers = {"Authorization": f"Bearer {key}"}
        body = {"lora_name": "new", "lora_path": "good"}
        answer = call(AdapterPool(), LOAD, body, headers=headers, access=access, of_parts=SERVED)
        assert answer.status_code == status


def test_two_that_load_one_name_at_once_do_not_both_get_it():
    async def both() -> list:
        pool = AdapterPool()
        calls = [pool.adapters.load("new", path) for path in ("good", "other")]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [type(one).__name__ for one in asyncio.run(both())] == ["Variant", "AdapterExists"]
