"""`GET /`: the playground page; for requests that prefer JSON, the server's name and models."""

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from wingbeat.deployments.api.served_models import ServedModels

DRAFTER_PATH = "/v1/drafter"
FOLDER = Path(__file__).parent
SCRIPTS = ("elements.js", "stream.js", "markdown.js", "run.js", "tree.js", "panel.js", "heads.js", "controls.js")
SCRIPTS += ("turns.js", "main.js")
"""Files that are joined, in this order, to a single script of the page."""


def add_page(app: FastAPI, models: ServedModels) -> None:
    """Add `/`. The page's files are read once, in this call. The page opens in chat mode if the first model has a chat
    template.
    """
    html = page(models.first.tokenizer.chat_template is not None)
    headers = page_headers(html)

    @app.get("/")
    async def root(request: Request) -> Response:
        if not wants_json(request.headers.getlist("accept")):
            return HTMLResponse(html, headers=headers)
        names = [pool.info.model_name for pool in models.pools]
        body = {"name": "wingbeat", "model": ", ".join(names), "api": "/v1"}
        # The page shows versions of the draft head if the server has the endpoint `/v1/drafter`.
        paths = {getattr(route, "path", None) for route in app.routes}
        body |= {"drafter": DRAFTER_PATH} if DRAFTER_PATH in paths else {}
        return JSONResponse(body, headers={"Vary": "Accept"})


def page(chats: bool = False) -> str:
    """Return the page as one HTML text that contains style and script. `chats` is whether the page opens in chat
    mode.
    """
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    script = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    html = html.replace("<body>", "<body data-chat>") if chats else html
    html = html.replace("<style></style>", f"<style>\n{style}</style>")
    return html.replace('<script type="module"></script>', f'<script type="module">\n{script}</script>')


def wants_json(accept: list[str]) -> bool:
    """Return whether a request's Accept headers prefer JSON to HTML, by RFC 9110, 12.5.1.

    If the qualities are equal, a type that is named is preferred to a type that only a wildcard matches. If neither
    type is preferred, the result is False.
    """
    ranges = dict(_ranges(",".join(accept)))
    json, html = (
        next((ranges[like], -place) for place, like in enumerate((name, kind, "*/*", None)) if like in ranges)
        for name, kind in (("application/json", "application/*"), ("text/html", "text/*"))
    )
    return json > html


def page_headers(html: str) -> dict[str, str]:
    """Return headers that permit the page only its own script and style (given by their hashes), and only connections
    to its own server.

    Raises:
        ValueError: the page does not have exactly one script and one style.
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
        # Trusted types are required, so that no string, wherever it comes from, is inserted as HTML.
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


def _ranges(accept: str) -> Iterator[tuple[str | None, float]]:
    """Yield the media ranges of an Accept header with their qualities; a type of None stands for all types that are not
    named.
    """
    yield None, 0.0
    for part in accept.lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        quality = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        yield name, float(quality) if re.fullmatch(r"[01](\.\d{0,3})?", quality) else 0.0


def _hash_of(element: str, html: str) -> str:
    contents = re.findall(rf"<{element}[^>]*>(.*?)</{element}>", html, re.DOTALL)
    if len(contents) != 1:
        raise ValueError(f"the page has {len(contents)} <{element}> elements: it must have one")
    return "sha256-" + base64.b64encode(hashlib.sha256(contents[0].encode()).digest()).decode()
