"""TCP proxy on loopback that delays every byte, to simulate a longer network path."""

import contextlib
import socket
import threading
import time
from queue import SimpleQueue

CHUNK_BYTES = 2**20


class DelayingProxy:
    """Forwards connections from `port` to a target port.

    Args:
        target: port on 127.0.0.1 to forward to.
    """

    def __init__(self, target: int) -> None:
        self.delay_s = 0.0
        """Delay in seconds, one way; may be changed at any time."""
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stops accepting connections."""
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                for source, sink in ((near, far), (far, near)):
                    sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._forward(source, sink)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        held: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

        def read() -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(CHUNK_BYTES):
                    held.put((time.perf_counter() + self.delay_s, data))
            held.put((0.0, b""))

        def write() -> None:
            with contextlib.suppress(OSError):
                while True:
                    due, data = held.get()
                    if not data:
                        break
                    time.sleep(max(due - time.perf_counter(), 0.0))
                    sink.sendall(data)
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)

        for work in (read, write):
            threading.Thread(target=work, daemon=True).start()
