"""`/openapi.json` and `/docs`: the endpoints and their fields, generated from the body classes."""

import html
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.requests import CompletionBody
from wingbeat.deployments.api.endpoints.server_routes import version_of_package
from wingbeat.deployments.parts import merged

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    **merged("bodies"),
}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
SCHEMAS = "#/components/schemas/"


class Endpoint(NamedTuple):
    """A method and path of the HTTP API."""

    method: str
    path: str


def add_description(app: FastAPI) -> None:
    """Adds `/openapi.json` and `/docs`, which describe the routes that the application has when this function is
    called.
    """
    document, page = _described(tuple(endpoints(app)), version_of_package())

    @app.get("/openapi.json")
    async def openapi() -> Mapping[str, Any]:
        return document

    @app.get("/docs")
    async def docs() -> HTMLResponse:
        # The security policy allows only inline styles, because the page has no script and loads nothing.
        return HTMLResponse(page, headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"})


@cache
def _described(served: tuple[Endpoint, ...], version: str) -> tuple[Mapping[str, Any], str]:
    """Returns the document and its page. The result is cached, for applications of the same process that have equal
    endpoints.
    """
    document = describe(served, version)
    return document, as_page(document)


def endpoints(app: FastAPI) -> list[Endpoint]:
    """Returns the application's endpoints in the order in which they were added."""
    return [Endpoint(method.lower(), route.path) for route in app.routes for method in sorted(route.methods)]


def describe(served: Iterable[Endpoint], version: str) -> dict[str, Any]:
    """Returns the OpenAPI document."""
    schemas: dict[str, Any] = {"Error": ERROR}
    paths: dict[str, dict[str, Any]] = {}
    for method, path in served:
        operation: dict[str, Any] = {
            "operationId": f"{method} {path}",
            "responses": {"200": {"description": "The answer."}, "default": _json("An error.", f"{SCHEMAS}Error")},
        }
        if method == "post" and path in BODIES:
            body = BODIES[path]
            schema = body.model_json_schema(ref_template=SCHEMAS + "{model}")
            schemas |= schema.pop("$defs", {})
            schemas[body.__name__] = schema
            operation["summary"] = (body.__doc__ or "").strip().partition("\n")[0]
            operation["requestBody"] = {"required": True, **_json("The request.", SCHEMAS + body.__name__)}
        parameter = path.partition("{")[2].partition("}")[0].partition(":")[0]
        if parameter:
            fields = {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [fields]
        paths.setdefault(path.replace(":path}", "}"), {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Wingbeat", "version": version},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def as_page(document: Mapping[str, Any]) -> str:
    """Returns the document as an HTML page."""
    schemas = document["components"]["schemas"]
    sections = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            sections.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].removeprefix(SCHEMAS)
                sections.append(_table(schemas[name]))
    return _PAGE.format(sections="\n".join(sections))


def _table(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = (
        f"<tr><td><code>{html.escape(name)}</code>{' *' if name in required else ''}</td>"
        f"<td>{html.escape(_kind(field))}</td></tr>"
        for name, field in schema["properties"].items()
    )
    return f"<table>{''.join(rows)}</table>"


def _kind(schema: Mapping[str, Any]) -> str:
    """Returns a field's type in a few words."""
    if "anyOf" in schema:
        return " or ".join(kind for kind in map(_kind, schema["anyOf"]) if kind != "null")
    if "$ref" in schema:
        return schema["$ref"].removeprefix(SCHEMAS)
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    low, high = schema.get("minimum"), schema.get("maximum")
    limits = "" if low is None and high is None else f", {'' if low is None else low} to {'' if high is None else high}"
    return f"{schema.get('type', 'any')}{limits}"


def _json(description: str, reference: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": {"$ref": reference}}}}


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Wingbeat: HTTP API</title>
<style>
  :root {{ color-scheme: light dark }}
  body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 50em; margin: 2em auto; padding: 0 1em }}
  h2 {{ font-size: 1em; margin: 2em 0 .5em }}
  table {{ border-collapse: collapse; font-size: .9em }}
  td {{ padding: .1em 1.5em .1em 0; vertical-align: top }}
</style>
<h1>HTTP API</h1>
<p>The same for programs: <a href="openapi.json">openapi.json</a>. A field with * must be given.</p>
{sections}
"""
