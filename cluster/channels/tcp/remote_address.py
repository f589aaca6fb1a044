"""Address of a remote channel's verifier, and the secret that its drafter must prove; Ray transports both.

The channel's spec is pickled, because the replica that passes the address on has not loaded torch.
"""

from typing import NamedTuple


class RemoteAddress(NamedTuple):
    """Address of a channel between two nodes, in place of the name of a channel on one node."""

    host: str
    port: int
    secret: bytes
    spec: bytes
    """The channel's `ChannelSpec`, pickled."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def __repr__(self) -> str:
        return f"RemoteAddress({self}, secret=***)"
