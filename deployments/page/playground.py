"""`GET /`: the playground for browsers, the server's name and model as JSON for everyone else."""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from wingbeat.deployments.fleet.engine_pool import EnginePool

PAGE = Path(__file__).with_name("index.html")


def add_page(app: FastAPI, pool: EnginePool) -> None:
    """Serve `/`; the file is read once, here."""
    html = PAGE.read_text(encoding="utf-8")
    headers = page_headers(html)

    @app.get("/")
    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", "").lower():
            return HTMLResponse(html, headers=headers)
        body = {"name": "wingbeat", "model": pool.info.model_name, "api": "/v1"}
        return JSONResponse(body, headers={"Vary": "Accept"})


def page_headers(html: str) -> dict[str, str]:
    """What the page is sent with: it runs its own script and style, by their hashes, and talks to its own server only.

    Raises:
        ValueError: the page has not exactly one script and one style.
    """
    policy = (
        "default-src 'none'",
        f"script-src '{_hash_of('script', html)}'",
        f"style-src '{_hash_of('style', html)}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No string becomes HTML, whoever wrote it.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "Vary": "Accept",
    }


def _hash_of(element: str, html: str) -> str:
    contents = re.findall(rf"<{element}[^>]*>(.*?)</{element}>", html, re.DOTALL)
    if len(contents) != 1:
        raise ValueError(f"the page has {len(contents)} <{element}> elements: it must have one")
    return "sha256-" + base64.b64encode(hashlib.sha256(contents[0].encode()).digest()).decode()
