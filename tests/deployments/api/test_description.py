"""The description of the API names every endpoint and every field that is read, and its page loads nothing."""

import re

import pytest

from tests.deployments.http_world import FakePool, app_for, call
from wingbeat.deployments.api.description.routes import BODIES, SCHEMAS, Endpoint, describe, endpoints

ALL_PATHS = {"loads_adapters": True}
"""Parts of a service that has each path there is."""


def document() -> dict:
    return call(FakePool(), "/openapi.json", method="GET", of_parts=ALL_PATHS).json()


def test_every_endpoint_is_described():
    paths = document()["paths"]
    for method, path in endpoints(app_for(FakePool(), of_parts=ALL_PATHS)):
        if path not in ("/openapi.json", "/docs"):
            assert method in paths[path.replace(":path}", "}")]


@pytest.mark.parametrize("path", BODIES)
def test_the_fields_of_a_body_are_those_that_are_read(path):
    described = describe([Endpoint("post", path)], "1")
    reference = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = described["components"]["schemas"][reference.removeprefix(SCHEMAS)]
    assert set(schema["properties"]) == set(BODIES[path].model_fields)


def test_every_reference_leads_somewhere():
    described = document()
    references = set(re.findall(rf'"{SCHEMAS}(\w+)"', str(described).replace("'", '"')))
    assert references
    assert references <= described["components"]["schemas"].keys()


def test_the_page_shows_endpoints_and_fields_without_scripts_or_other_resources():
    response = call(FakePool(), "/docs", method="GET")
    assert response.headers["content-type"].startswith("text/html")
    assert "POST /v1/chat/completions" in response.text
    assert "continue_final_message" in response.text
    assert not re.search(r"<script|<link|<img|src=|@import|url\(|https?://", response.text)
    assert "default-src 'none'" in response.headers["content-security-policy"]
