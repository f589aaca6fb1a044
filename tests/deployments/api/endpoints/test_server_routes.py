"""Routes for operators, and which of them need a key."""

from importlib.metadata import version

import pytest
from pydantic import SecretStr

from tests.deployments.http_world import FakePool, call
from tests.deployments.pool_world import collect, make_request, run, tokens
from tests.fakes import expected_tokens
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.fleet.interface import EngineUnavailable

KEYED = Access(api_keys=(SecretStr("one"),))


def test_the_version_is_the_packages():
    assert call(FakePool(), "/version", method="GET").json() == {"version": version("wingbeat")}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_tells_by_its_status_whether_an_engine_is_up(method):
    pool = FakePool()
    assert call(pool, "/ping", method=method).status_code == 200
    pool.alive = False
    assert call(pool, "/ping", method=method).status_code == 503


def test_the_prefix_cache_is_reset_by_a_post_without_a_body():
    pool = FakePool()
    assert call(pool, "/reset_prefix_cache").json() == {"success": True, "engines": 1}
    assert call(pool, "/reset_prefix_cache", method="GET").status_code == 405
    assert pool.cache_engine.num_resets == 1


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/detokenize", {"tokens": [1]}),
        ("GET", "/tokenizer_info", None),
    ],
)
def test_what_computes_or_changes_something_needs_the_key(method, path, body):
    pool = FakePool()
    assert call(pool, path, body, method, access=KEYED).status_code == 401
    for headers in ({"Authorization": "Bearer one"}, {"X-Api-Key": "one"}):
        assert call(pool, path, body, method, headers=headers, access=KEYED).status_code == 200
    both = {"Authorization": "Bearer two", "X-Api-Key": "one"}
    assert call(pool, path, body, method, headers=both, access=KEYED).status_code == 401


@pytest.mark.parametrize("path", ["/version", "/ping", "/health"])
def test_what_balancers_and_dashboards_read_needs_none(path):
    assert call(FakePool(), path, method="GET", access=KEYED).status_code == 200


def test_the_prefix_cache_is_an_operators_matter():
    pool, access = FakePool(), Access(api_keys=(SecretStr("one"),), operator_keys=(SecretStr("two"),))
    for key, status in (("one", 401), ("two", 200)):
        headers = {"Authorization": f"Bearer {key}"}
        assert call(pool, "/reset_prefix_cache", headers=headers, access=access).status_code == status
    assert pool.cache_engine.num_resets == 1


def test_every_engine_resets_its_cache_while_requests_run():
    async def scenario(source, pool):
        assert await pool.every_engine.operate("reset_prefix_cache") == [None, None]
        assert [engine.num_resets for engine in source.engines.values()] == [1, 1]
        request = make_request()
        assert tokens(await collect(pool, request)) == expected_tokens(request.prompt_token_ids, 7, 20)

    run(scenario, "a", "b")


def test_an_engine_that_is_gone_is_told():
    async def scenario(source, pool):
        source.killed.add("a")
        with pytest.raises(EngineUnavailable, match="before it answered"):
            await pool.every_engine.operate("reset_prefix_cache")

    run(scenario, "a")
