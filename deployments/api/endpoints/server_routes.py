"""`/version`, `/ping` and `/health` for monitoring, and `/reset_prefix_cache` for operators."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from wingbeat.deployments.api.served_models import ServedModels

PACKAGE = "wingbeat"


def version_of_package() -> str:
    """Returns the version of the installed package `wingbeat`."""
    return version(PACKAGE)


def add_server_routes(app: FastAPI, models: ServedModels) -> None:
    """Adds the four endpoints."""

    @app.get("/version")
    async def version_of_server() -> dict[str, Any]:
        return {"version": version_of_package()}

    @app.api_route("/ping", methods=["GET", "POST"])
    async def ping() -> Response:
        healthy = any(pool.healthy() for pool in models.pools)
        return Response() if healthy else Response(status_code=503, headers={"Retry-After": "1"})

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        # A server with several models answers 200 while at least one model has an engine, so that a load balancer goes
        # on sending requests to it.
        states = {pool.info.model_name: "ok" if pool.healthy() else "unavailable" for pool in models.pools}
        named = {"models": states} if len(models) > 1 else {}
        if "ok" in states.values():
            return JSONResponse({"status": "ok", **named})
        return JSONResponse({"status": "unavailable", **named}, status_code=503, headers={"Retry-After": "1"})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, Any]:
        reset = [await pool.every_engine.operate("reset_prefix_cache", works=True) for pool in models.pools]
        return {"success": True, "engines": sum(map(len, reset))}
