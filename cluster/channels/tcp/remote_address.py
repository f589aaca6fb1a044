"""Address of a remote channel's verifier, and the secret that its drafter must prove; Ray transports both.

The replica that passes it on has no torch, so the channel's spec is pickled.
"""

from typing import NamedTuple


class RemoteAddress(NamedTuple):
    """Replaces the channel name that is used on a single node."""

    host: str
    port: int
    secret: bytes
    spec: bytes
    """The channel's `ChannelSpec`, pickled."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def __repr__(self) -> str:
        return f"RemoteAddress({self}, secret=***)"
