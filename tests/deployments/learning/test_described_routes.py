"""Endpoints of the versions of a head in the description of the API."""

from functools import partial

import pytest
from pydantic import SecretStr

from tests.clients.schemathesis_run import check_no_errors
from tests.deployments.http_world import FakePool, call
from tests.e2e.page_server import serving
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.learning import routes
from wingbeat.deployments.learning.routes import DRAFTER_PATH, PROMOTE_PATH, ROLLBACK_PATH, HeadVersions
from wingbeat.runtime.learning.head_versions import HeadLedger

KEY = "operators"


@pytest.fixture
def add_routes(tmp_path):
    heads = HeadVersions(HeadLedger(tmp_path / "ledger", tmp_path / "configured", "model"), None)
    return partial(routes.add_drafter_routes, heads=heads)


def test_the_endpoints_are_described(add_routes):
    paths = call(FakePool(), "/openapi.json", method="GET", more_routes=[add_routes]).json()["paths"]
    assert {path: set(paths[path]) for path in (DRAFTER_PATH, PROMOTE_PATH, ROLLBACK_PATH)} == {
        DRAFTER_PATH: {"get"},
        PROMOTE_PATH: {"post"},
        ROLLBACK_PATH: {"post"},
    }


@pytest.mark.clients
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_request_that_the_description_leads_to_is_an_error_of_the_server(add_routes, monkeypatch):
    pytest.importorskip("schemathesis")
    monkeypatch.setattr(routes, "TOLD_S", 0.1)  # no drafter follows this ledger
    with serving(Access(operator_keys=(SecretStr(KEY),)), more_routes=[add_routes]) as url:
        check_no_errors(url, KEY)
