"""Calls that an operator makes to a running server, and the command-line options for the server's URL and key."""

import json
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from wingbeat.deployments.cli.options import UserError

if TYPE_CHECKING:
    import urllib.error

TIMEOUT_S = 600.0
"""Maximum seconds to wait for an answer. The limit is long because engines may have to finish other work first, for
example before they compute a prefix.
"""
Url = Annotated[str, typer.Option(help="URL of the server.")]
Key = Annotated[
    str | None,
    typer.Option(
        "--operator-key", envvar="WINGBEAT_OPERATOR_KEY", help="Operator key of the server.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
LOCAL = "http://127.0.0.1:8000"


def call_server(
    url: str,
    key: str | None,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Sends a request and returns the server's answer. Fields of `body` that are None are left out.

    Raises:
        UserError: the server cannot be reached, or refuses the request.
    """
    import urllib.error
    import urllib.request

    class NoRedirects(urllib.request.HTTPRedirectHandler):
        """Handler of HTTP redirects that follows none, so that the operator's key is sent only to the server that the
        URL names.
        """

        def redirect_request(self, *args: Any, **kwargs: Any) -> None:
            return None

    if not url.startswith(("http://", "https://")):
        raise UserError(f"--url is {url!r}: must begin with http:// or https://")
    headers = {} if body is None else {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key.partition(',')[0].strip()}"
    fields = {name: value for name, value in (body or {}).items() if value is not None}
    content = None if body is None else json.dumps(fields).encode()
    request = urllib.request.Request(url.rstrip("/") + path, content, headers, method=method)
    no_proxies = [urllib.request.ProxyHandler({})] if _is_of_this_machine(url) else []
    try:
        with urllib.request.build_opener(NoRedirects, *no_proxies).open(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise UserError(_message(error)) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{url} does not answer: {getattr(error, 'reason', error)}") from error


def _is_of_this_machine(url: str) -> bool:
    """Returns whether the server runs on this machine. A proxy (http_proxy) could not reach such a server."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _message(error: "urllib.error.HTTPError") -> str:
    try:
        return json.load(error)["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.url} answers {error.code} {error.reason}"
