"""Access rules of the HTTP API: accepted Host and Origin headers, and keys."""

import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import SecretStr

from wingbeat.deployments.api.errors import ApiError, shown
from wingbeat.deployments.host_names import ANY, HOST, host_name

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})

_HOST_HEADER = re.compile(rf"({HOST})(?::\d*)?")
_ORIGIN = re.compile(rf"(https?)://(({HOST})(?::\d+)?)")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


@dataclass(frozen=True)
class Access:
    """Access rules of one server. By default all clients are allowed, except web pages of other origins."""

    hosts: frozenset[str] = frozenset({ANY})
    """Accepted host names without port, in lower case."""
    origins: frozenset[str] = frozenset()
    """Accepted origins in addition to the server's own origin, in lower case."""
    origin_hosts: frozenset[str] = frozenset()
    """Host names; a web page of such a host may use the server, whatever the port of its origin."""
    api_keys: tuple[SecretStr, ...] = field(default=())
    """If not empty, a request must carry one of these keys."""
    operator_keys: tuple[SecretStr, ...] = field(default=())
    """If not empty, requests to operators' paths must carry one of these keys. These keys give no access to other
    paths.
    """
    operators_only_by_key: bool = False
    """Whether operators' paths are refused to all clients if `operator_keys` is empty; otherwise without effect."""

    @classmethod
    def of_server(
        cls,
        bound_host: str | None,
        *,
        api_keys: Sequence[SecretStr] | None = None,
        operator_keys: Sequence[SecretStr] | None = None,
        allowed_origins: Sequence[str] | None = None,
        allowed_hosts: Sequence[str] | None = None,
    ) -> "Access":
        """Builds the rules of a server bound to `bound_host`; an argument that is None takes its default.

        A server on a loopback address accepts only loopback names in `Host` by default, because a request with another
        name comes from a malicious web page whose host name resolves to this machine (DNS rebinding).
        """
        local = is_loopback(bound_host)
        if allowed_hosts is None:
            allowed_hosts = (*LOOPBACK_HOSTS, bound_host) if local else (ANY,)
        return cls(
            hosts=frozenset(map(host_name, allowed_hosts)),
            origins=frozenset(origin.lower() for origin in allowed_origins or ()),
            origin_hosts=LOOPBACK_HOSTS if local and allowed_origins is None else frozenset(),
            api_keys=tuple(api_keys or ()),
            operator_keys=tuple(operator_keys or ()),
            operators_only_by_key=bool(api_keys) or not local,
        )

    def check_host(self, header: str | None) -> None:
        """Raises ApiError, 403, if the `Host` header is not an accepted name."""
        if ANY in self.hosts:
            return
        match = _HOST_HEADER.fullmatch((header or "").lower())
        if match is None or match[1] not in self.hosts:
            message = (
                f"This server does not answer under the host {shown(header or '')!r}; the setting allowed_hosts can "
                "add it."
            )
            raise ApiError(message, status=403, code="host_not_allowed")

    def takes_origin(self, origin: str, host: str | None) -> bool:
        """Returns whether a web page of this origin may use the server. `host` is the request's `Host` header."""
        origin = origin.lower()
        if origin in self.origins or ANY in self.origins:
            return True
        match = _ORIGIN.fullmatch(origin)
        if match is None:
            return False
        scheme, authority, name = match.groups()
        port = _DEFAULT_PORTS[scheme]
        is_own = authority.removesuffix(port) == (host or "").lower().removesuffix(port)
        return is_own or name in self.origin_hosts

    def check_key(self, authorizations: Sequence[str], keys: Sequence[str]) -> None:
        """Raises ApiError, 401, if the server has API keys and the headers carry none of these keys.

        Args:
            authorizations: values of the `Authorization` headers.
            keys: values of the `X-Api-Key` headers (Anthropic's), read only if there is no `Authorization` header.
        """
        if not authorizations and len(keys) == 1:
            authorizations = (f"Bearer {keys[0]}",)
        if self.api_keys and not _is_among(self.api_keys, authorizations):
            raise _unauthorized("A valid API key is needed: send it as 'Authorization: Bearer KEY'.")

    def check_operator(self, authorizations: Sequence[str]) -> None:
        """Raises ApiError, 401 or 403, if a request to an operators' path is not allowed.

        A server without operator keys allows every client if the server is bound to a loopback address and has no API
        keys; otherwise such a server allows no client.
        """
        if not self.operator_keys and self.operators_only_by_key:
            message = "This path is for operators, and the server has no operator_key; set one to use it."
            raise ApiError(message, status=403, code="operator_key_not_set")
        if self.operator_keys and not _is_among(self.operator_keys, authorizations):
            raise _unauthorized("A valid operator key is needed: send it as 'Authorization: Bearer KEY'.")


def _is_among(keys: Sequence[SecretStr], authorizations: Sequence[str]) -> bool:
    scheme, _, given = (authorizations[0] if len(authorizations) == 1 else "").partition(" ")
    given = given.strip().encode() if scheme.lower() == "bearer" else b""
    # All keys are compared, each in constant time, so that the duration of the check reveals nothing about the keys.
    return any([hmac.compare_digest(given, key.get_secret_value().encode()) for key in keys])


def _unauthorized(message: str) -> ApiError:
    return ApiError(message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def is_loopback(host: str | None) -> bool:
    """Returns whether a server bound to `host` can be reached only from this machine."""
    if host is None or host.lower() == "localhost":
        return host is not None
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
