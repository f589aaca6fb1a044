"""Where drafters of a remote channel connect: lets those in that prove its secret, and closes all others."""

import socket
import threading
import time
from collections.abc import Callable

from wingbeat.cluster.channels.header import ChannelError
from wingbeat.cluster.channels.tcp.remote_handshake import HANDSHAKE_S, Hello, hang_up, meet
from wingbeat.runtime.protocol.messages import ChannelSpec

MOST_PENDING = 16
"""Connections that have not proved themselves; one more, and the oldest is closed."""

Admit = Callable[[socket.socket, Hello], None]
"""Called in a thread of its own, with a connection that has proved the secret and is the caller's from then on."""


class Listener:
    """A port of this node and the thread that answers it; each stranger is met in a thread, so none waits for another.

    Args:
        host: address of this node to listen on.

    Raises:
        ChannelError: it cannot be listened on.
    """

    def __init__(self, host: str, secret: bytes, spec: ChannelSpec, admit: Admit) -> None:
        self._secret, self._spec, self._admit = secret, spec, admit
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._sock.bind((host, 0))
            self._sock.listen(MOST_PENDING)
        except OSError as error:
            self._sock.close()
            raise ChannelError(f"the remote channel cannot listen on {host}: {error}") from None
        self.port: int = self._sock.getsockname()[1]
        self._lock = threading.Lock()
        self._pending: list[socket.socket] = []
        """Strangers, the oldest first."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="wingbeat-remote-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; harmless a second time."""
        self._closed = True
        hang_up(self._sock)
        if threading.current_thread() is not self._thread:
            self._thread.join(HANDSHAKE_S)

    def _run(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._sock.accept()
            except OSError:  # closed; or it has left again, or this process has too many files open
                time.sleep(0.01)
                continue
            with self._lock:
                if len(self._pending) == MOST_PENDING:
                    hang_up(self._pending.pop(0))
                self._pending.append(sock)
            try:
                threading.Thread(target=self._meet, args=(sock,), name="wingbeat-remote-stranger", daemon=True).start()
            except RuntimeError:  # too many threads here: later drafters shall find a listener all the same
                with self._lock:
                    self._pending.remove(sock)
                sock.close()
        self._sock.close()
        with self._lock:
            for sock in self._pending:
                hang_up(sock)

    def _meet(self, sock: socket.socket) -> None:
        hello = meet(sock, self._secret, self._spec)
        with self._lock:
            was_pending = sock in self._pending
            if was_pending:
                self._pending.remove(sock)
        if hello is None or not was_pending:
            sock.close()
        else:
            self._admit(sock, hello)
