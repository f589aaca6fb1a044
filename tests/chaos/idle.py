"""Connections that say nothing, as browsers and pools of clients hold them."""

import socket
from urllib.parse import urlsplit

NUM_IDLE = 3


class IdleConnections:
    """Some that were answered once, one that has said nothing yet, and one in the middle of a request."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socks = [socket.create_connection((parts.hostname, parts.port), 30.0) for _ in range(NUM_IDLE + 2)]
        for sock in self._socks[:NUM_IDLE]:
            sock.sendall(f"GET {parts.path}/health HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        self._socks[NUM_IDLE].sendall(f"POST {parts.path}/v1/completions HTTP/1.1\r\n".encode())

    def close(self) -> None:
        """Leave."""
        for sock in self._socks:
            sock.close()
