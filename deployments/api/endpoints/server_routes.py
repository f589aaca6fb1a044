"""`/version`, `/ping`, `/health`, `/reset_prefix_cache`: what operators and their scripts ask of a server."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from wingbeat.deployments.api.completions import CompletionService

PACKAGE = "wingbeat"


def version_of_package() -> str:
    """Of the package that is installed."""
    return version(PACKAGE)


def add_server_routes(app: FastAPI, service: CompletionService) -> None:
    """Add the four endpoints."""

    @app.get("/version")
    async def version_of_server() -> dict[str, Any]:
        return {"version": version_of_package()}

    @app.api_route("/ping", methods=["GET", "POST"])
    async def ping() -> Response:
        return Response() if service.pool.healthy() else Response(status_code=503, headers={"Retry-After": "1"})

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if service.pool.healthy():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable"}, status_code=503, headers={"Retry-After": "1"})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, Any]:
        return {"engines": len(await service.pool.every_engine.operate("reset_prefix_cache", works=True))}
