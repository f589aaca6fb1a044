"""ASGI middleware around all routes: checks method, headers and size of requests by the rules of `docs/http_api.md`,
and adds the headers of every answer.

The middleware reads only the paths and methods of the routes. Fields of a body are checked by the routes.
"""

import asyncio
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wingbeat.deployments.api.access import Access
from wingbeat.deployments.api.bodies.unserved_fields import HEADER, IgnoredFields, gather
from wingbeat.deployments.api.errors import ApiError, ClientGone, as_api_error, error_body, log_failure, shown
from wingbeat.deployments.api.incoming import Bodies, BodyRoom, Incoming, answer_early
from wingbeat.deployments.limits import MAX_BODY_BYTES
from wingbeat.deployments.parts import hooks
from wingbeat.deployments.request_context import RequestContext, enter

logger = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that closed the connection; appears only in access logs."""
_REQUEST_ID = re.compile(r"[ -~]{1,128}")
_OPERATORS = frozenset({"/reset_prefix_cache"}).union(*hooks("operator_paths"))
"""Paths for operators; see `Access.check_operator`."""
_KEYED = ("/v1", "/tokenize", "/detokenize", "/tokenizer_info")
"""Prefixes of paths that need an API key, because they start a computation, or return data that a caller without a key
should not see.
"""
_WITH_BODIES = frozenset().union(*hooks("bodies"))
"""Paths of the parts' routes that read a body. They compute, so they need an API key whatever their prefix is."""
_WITHOUT_BODY = ("/ping", "/reset_prefix_cache")
"""Paths whose POST triggers an action without a body; a body that a client sends is ignored."""
_MAY_LACK_BODY = frozenset().union(*hooks("optional_bodies"))
"""Paths whose POST may have no body, because all fields are optional."""
_CORS = {"access-control-expose-headers": f"X-Request-Id, Retry-After, {HEADER}", "vary": "Origin"}
_PREFLIGHT_AGE_S = "600"
_MOST_TOLD = 1024
"""Maximum number of different sets of ignored fields that are remembered. A remembered set is not logged again, because
an agent sends the same fields with each request.
"""


@dataclass(frozen=True)
class HttpLimits:
    """Limits of one HTTP request."""

    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_s: float = 60.0
    """Maximum seconds from a request's headers to the end of its body. A slower client would occupy memory that other
    requests need.
    """
    refuses_unknown_fields: bool = False
    """Whether an unknown field is answered by 400 instead of being named as ignored."""
    max_held_bodies: int = 16
    """Memory for all bodies that are held at once, as a number of bodies of maximum size; short bodies are not counted.
    A request that would exceed the memory gets 503.
    """
    max_dropped_bytes: int = 64 * 2**20
    """Maximum bytes of a refused request's body that are read and dropped before the connection is closed, so that the
    client gets to read the answer.
    """
    drop_timeout_s: float = 10.0
    """Maximum seconds for reading and dropping the rest of a refused request's body."""


class RequestWatcher:
    """Observer whose methods are called for every HTTP request, also for refused requests."""

    def began(self, scope: Scope, context: RequestContext) -> None:
        """Called when a request has arrived."""

    def ended(self, scope: Scope, context: RequestContext) -> None:
        """Called when the answer is complete or was given up; `context.status` is its HTTP status."""

    def close(self) -> None:
        """Called when the router ends; may block until the watcher has finished its work."""


class HttpGuard:
    """Middleware that refuses requests that break a rule, reads bodies, and converts exceptions raised by routes to
    error answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[BaseRoute],
        access: Access,
        limits: HttpLimits,
        adds_request_id: bool = True,
        watchers: Sequence[RequestWatcher] = (),
        marks: Mapping[str, str] | None = None,
    ) -> None:
        """Makes the middleware.

        Args:
            adds_request_id: False if the server in front writes `X-Request-Id` itself, as Serve's proxy does.
            marks: headers of every answer.
        """
        self._app = app
        self._routes = routes
        self._access = access
        self._limits = limits
        self._adds_request_id = adds_request_id
        self._watchers = watchers
        self._marks = {name.lower(): value for name, value in (marks or {}).items()}
        self._told: set[tuple[str, str]] = set()
        self._bodies = Bodies(limits.max_held_bodies * limits.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request. An exception of a route becomes an error answer; if the answer has already begun, the
        exception is raised.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id, problem = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id
        context = RequestContext(request_id, headers.get("x-session-id", ""))
        enter(context)
        ignored = gather(self._limits.refuses_unknown_fields)
        for watcher in self._watchers:
            watcher.began(scope, context)
        added = self._added_headers(headers, request_id)
        incoming, started = Incoming(receive, self._limits.max_dropped_bytes), False

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started, context.status = True, message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *added, *self._named(scope, ignored)]}
            await send(message)

        try:
            await self._pass_on(scope, headers, problem, incoming, send_marked)
        except ClientGone:
            if not started:
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, incoming, send_marked)
        except Exception as error:
            answer = as_api_error(error)
            log_failure(error, request_id)
            if started:
                raise
            body = error_body(scope["path"], answer)
            response = JSONResponse(body, status_code=answer.status, headers=answer.headers)
            await answer_early(response, scope, incoming, send_marked, self._limits.drop_timeout_s)
        finally:
            for watcher in self._watchers:
                watcher.ended(scope, context)

    async def _pass_on(
        self, scope: Scope, headers: Headers, problem: ApiError | None, receive: Receive, send: Send
    ) -> None:
        """Checks a request in the order given in `docs/http_api.md`, then lets the application answer."""
        route, origin, host = self._route(scope), _joined(headers, "origin"), _joined(headers, "host")
        is_preflight = scope["method"] == "OPTIONS" and origin and "access-control-request-method" in headers
        if scope["method"] not in route.methods and not is_preflight:
            raise _not_allowed(scope["method"], route)
        self._access.check_host(host)
        if origin is not None and not self._access.takes_origin(origin, host):
            message = f"Pages of {shown(origin)!r} may not use this server; the setting allowed_origins can add them."
            raise ApiError(message, status=403, code="origin_not_allowed")
        if is_preflight:
            await _preflight_answer(headers, route)(scope, receive, send)
            return
        if route.path in _OPERATORS:
            self._access.check_operator(headers.getlist("authorization"))
        elif route.path in _WITH_BODIES or route.path.startswith(_KEYED):
            self._access.check_key(headers.getlist("authorization"), headers.getlist("x-api-key"))
        if problem is not None:
            raise problem
        lacks_body = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        is_bare = route.path in _WITHOUT_BODY or (lacks_body and route.path in _MAY_LACK_BODY)
        if scope["method"] != "POST" or is_bare:
            await self._app(scope, receive, send)
            return
        with self._bodies.room() as room:
            await self._app(scope, await self._read_body(headers, receive, room), send)

    def _route(self, scope: Scope) -> BaseRoute:
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return route
        near = get_close_matches(scope["path"], [route.path for route in self._routes], 1, 0.8)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        message = f"There is nothing at {shown(scope['path'])!r}.{meant}"
        raise ApiError(message, status=404, code="unknown_url")

    async def _read_body(self, headers: Headers, receive: Receive, room: BodyRoom) -> Receive:
        """Checks and reads the whole body; returns a `receive` function that first returns the body as one message,
        then the messages that come after the body.
        """
        kind = headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            message = f"The Content-Type is {shown(kind)!r}; it must be 'application/json'."
            raise ApiError(message, status=415, code="unsupported_media_type")
        encoding = headers.get("content-encoding", "")
        if encoding.strip().lower() not in ("", "identity"):
            message = f"The Content-Encoding is {shown(encoding)!r}; send the body without compression."
            identity = {"Accept-Encoding": "identity"}
            raise ApiError(message, status=415, code="unsupported_media_type", headers=identity)
        announced, limit = headers.get("content-length", ""), self._limits.max_body_bytes
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > limit):
            raise _too_large(limit)
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                body = await _body(receive, limit, room)
        except TimeoutError:
            message = f"The request body was not complete after {self._limits.body_timeout_s:g} s."
            raise ApiError(message, status=408, code="body_timeout") from None
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        return receive_again

    def _named(self, scope: Scope, ignored: IgnoredFields) -> list[tuple[bytes, bytes]]:
        """Returns the header that names the request's ignored fields, if it has any; logs each set of ignored fields
        once.
        """
        names = str(ignored)
        if not names:
            return []
        told = (scope["path"], names)
        if told not in self._told:
            if len(self._told) == _MOST_TOLD:
                self._told.clear()
            self._told.add(told)
            logger.info("Ignored in a request to %s: %s.", *told)
        return [(HEADER.lower().encode(), names.encode())]

    def _added_headers(self, headers: Headers, request_id: str) -> list[tuple[bytes, bytes]]:
        """Returns the headers of every answer to this request."""
        added = self._marks | ({"x-request-id": request_id} if self._adds_request_id else {})
        origin = _joined(headers, "origin")
        if origin is not None and self._access.takes_origin(origin, _joined(headers, "host")):
            added |= _CORS | {"access-control-allow-origin": origin}
        return [(name.encode(), value.encode("latin-1")) for name, value in added.items()]


async def _body(receive: Receive, limit: int, room: BodyRoom) -> bytes:
    """Reads the whole body.

    Raises:
        ApiError: 413, the body has more than `limit` bytes.
        EngineOverloaded: the bodies held for all requests exceed their limit.
        ClientGone: the connection was closed before the body was complete.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        if len(body) + len(part) > limit:
            raise _too_large(limit)
        body += part
        room.set_size(len(body))
        if not message.get("more_body", False):
            return bytes(body)


def _request_id(headers: Headers) -> tuple[str, ApiError | None]:
    """Returns a request id, and an error or None. The id is the caller's `X-Request-Id`, or a random id if the header
    is absent or invalid; if the header is invalid, the error says so.
    """
    given, drawn = headers.getlist("x-request-id"), uuid.uuid4().hex
    if not given:
        return drawn, None
    if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]):
        return given[0], None
    message = "The header X-Request-Id must be given once, as 1 to 128 printable ASCII characters."
    return drawn, ApiError(message, param="X-Request-Id", code="invalid_header")


def _joined(headers: Headers, name: str) -> str | None:
    """Returns a header's value, None if absent.

    If the header was sent more than once, which no browser does, the values are joined to a value that no rule accepts.
    """
    return ", ".join(headers.getlist(name)) if name in headers else None


def _preflight_answer(headers: Headers, route: BaseRoute) -> Response:
    allowed = {"Access-Control-Allow-Methods": _methods(route), "Access-Control-Max-Age": _PREFLIGHT_AGE_S}
    asked = headers.get("access-control-request-headers")
    if asked:
        allowed["Access-Control-Allow-Headers"] = asked
    return Response(status_code=204, headers=allowed)


def _methods(route: BaseRoute) -> str:
    return ", ".join(sorted(route.methods))


def _not_allowed(method: str, route: BaseRoute) -> ApiError:
    message = f"{shown(method)} is not served here, only {_methods(route)}."
    return ApiError(message, status=405, code="method_not_allowed", headers={"Allow": _methods(route)})


def _too_large(limit: int) -> ApiError:
    return ApiError(f"The request body is longer than {limit} bytes.", status=413, code="body_too_large")
