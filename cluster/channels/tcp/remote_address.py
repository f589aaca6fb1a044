"""Where a remote channel's verifier listens, and the secret that its drafter proves; Ray carries it between them.

The replica that passes it on has no torch, so the shapes travel pickled.
"""

from typing import NamedTuple


class RemoteAddress(NamedTuple):
    """Takes the place of the name that a channel on one node has."""

    host: str
    port: int
    secret: bytes
    spec: bytes
    """The channel's `ChannelSpec`, pickled."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def __repr__(self) -> str:
        return f"RemoteAddress({self}, secret=***)"
