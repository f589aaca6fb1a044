"""Normalises hosts and origins, as they occur in the headers `Host` and `Origin`."""

import ipaddress
import re

ANY = "*"
HOST = r"\[[0-9a-f:.]+\]|[^\s/:@\[\]]+"
"""Pattern of a host in lower case, without its port."""


def host_name(text: str) -> str:
    """Returns a host as in the header `Host`: in lower case, without a port, IPv6 addresses in brackets.

    Raises:
        ValueError: the text is not a host name or address, or has a port.
    """
    name = text.strip().lower()
    if name == ANY or re.fullmatch(HOST, name):
        return name
    try:
        return f"[{ipaddress.IPv6Address(name)}]"
    except ValueError:
        raise ValueError(f"{text!r}: must be a host name or an address without a port, or '*'") from None


def origin_name(text: str) -> str:
    """Returns an origin as browsers write it: scheme, host and port in lower case, or `null`.

    Raises:
        ValueError: the text is not an origin.
    """
    name = text.strip().lower().removesuffix("/")
    if name in (ANY, "null") or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+", name):
        return name
    raise ValueError(f"{text!r}: must be an origin such as https://example.org or http://localhost:3000, or '*'")


def url_of(host: str, port: int) -> str:
    """Returns the URL of a server that listens on an address, with IPv6 addresses in brackets."""
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"
