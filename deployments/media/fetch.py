"""Fetches images and audio from the hosts that an operator allows, and never from addresses in private networks.

A host name is resolved once per connection. All of its addresses are checked, and the connection uses only the checked
addresses, so that a second DNS answer cannot lead to another address. Each hop of a redirect is checked in the same
way.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from wingbeat.deployments.media.limits import MediaError, MediaLimits
from wingbeat.runtime.media.media_input import IMAGE

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Function (host, port) -> addresses of the host; raises OSError if the host has no address."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK_BYTES = 2**16
_UNSAID = frozenset({"application/octet-stream", "binary/octet-stream"})
"""Content types that do not identify the content.

Aiohttp reports `application/octet-stream` if the header is absent.
"""


def is_public(address: str) -> bool:
    """Returns whether an address is public: not private, local, shared, reserved or in an IPv6 tunnel to IPv4."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        elif parsed.sixtofour is not None or parsed.teredo is not None or parsed in _NAT64:
            return False
    return parsed.is_global and not parsed.is_multicast


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""Prefix of IPv6 addresses that a gateway translates to IPv4 (RFC 6052)."""


async def look_up(host: str, port: int) -> list[str]:
    """Resolves a host with this machine's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Fetcher:
    """Fetches images or audio over http and https.

    Args:
        limits: allowed hosts, sizes and times.
        kind: kind of media, equal to the first half of the content type.
        resolve: resolves host names.
        may_connect: returns whether connections to an address are allowed.
    """

    def __init__(
        self,
        limits: MediaLimits,
        kind: str = IMAGE,
        resolve: Resolve = look_up,
        may_connect: Callable[[str], bool] = is_public,
    ) -> None:
        self._kind = kind
        self._limits = limits
        self._resolver = _CheckedResolver(resolve, may_connect)

    async def fetch(self, url: str) -> bytes:
        """Fetches the content of a URL.

        Raises:
            MediaError: the URL is not allowed, or its content is too large, too slow or cannot be fetched.
        """
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                connector = aiohttp.TCPConnector(resolver=self._resolver, use_dns_cache=False, force_close=True)
                async with aiohttp.ClientSession(
                    connector=connector,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    auto_decompress=False,
                    headers={"Accept": f"{self._kind}/*", "Accept-Encoding": "identity"},
                ) as session:
                    return await self._follow(session, url)
        except TimeoutError as error:
            raise MediaError(f"took longer to fetch than {self._limits.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, MediaError):
                raise
            # The text of the error is not shown to the client, because it could describe hosts that the client cannot
            # reach.
            raise MediaError(f"cannot be fetched: {type(error).__name__}") from error

    async def _follow(self, session: aiohttp.ClientSession, url: str) -> bytes:
        for _ in range(self._limits.max_redirects + 1):
            self._check(url)
            async with session.get(url, allow_redirects=False) as response:
                target = response.headers.get("Location")
                if response.status in _REDIRECTS and target:
                    url = urljoin(url, target)
                    continue
                if response.status != 200:
                    raise MediaError(f"cannot be fetched: its host answered {response.status}")
                return await self._read(response)
        raise MediaError(f"is redirected more than {self._limits.max_redirects} times")

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        content_type = response.content_type.lower()
        if content_type.partition("/")[0] != self._kind and content_type not in _UNSAID:
            raise MediaError(f"has the content type {content_type[:64]}, which is not {self._kind}")
        if (response.content_length or 0) > self._limits.max_bytes:
            raise MediaError(f"has more than {self._limits.max_bytes} bytes")
        body = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            body += chunk
            if len(body) > self._limits.max_bytes:
                raise MediaError(f"has more than {self._limits.max_bytes} bytes")
        return bytes(body)

    def _check(self, url: str) -> None:
        """Raises MediaError if a URL may not be fetched; called before the URL's host is resolved."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise MediaError("is not a URL") from None
        if parts.scheme not in ("http", "https") or not host:
            raise MediaError("must be a URL of scheme http, https or data")
        if parts.username is not None or parts.password is not None:
            raise MediaError("contains a user name, which is not supported")
        if host.lower() not in self._limits.allowed_domains:
            raise MediaError("is at a host that is not in --allowed-media-domains")
        # A host that is an IP address is checked here, because such a host is not resolved, so the resolver cannot
        # check it.
        if _is_address(host) and not self._resolver.may_connect(host):
            raise MediaError("is at an address that is not public")


class _CheckedResolver(AbstractResolver):
    """Resolver that returns a host's addresses only if all of them are allowed."""

    def __init__(self, resolve: Resolve, may_connect: Callable[[str], bool]) -> None:
        self._resolve = resolve
        self.may_connect = may_connect

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[ResolveResult]:
        """See `AbstractResolver`; raises MediaError if an address is not allowed."""
        addresses = await self._resolve(host, port)
        if not addresses or not all(map(self.may_connect, addresses)):
            raise MediaError("is at an address that is not public")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """Does nothing, because the resolver holds no resources."""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
