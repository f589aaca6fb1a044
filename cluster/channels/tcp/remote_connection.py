"""Frames over one authenticated TCP connection: each frame is the length of a body, then the body.

Neither end ever waits for the rest of a frame. A frame is processed only once it is complete, and the length of a body
is bounded. The standard library's `multiprocessing.connection` is not used, because its calls block until the rest of a
message arrives, so a drafter that is stopped while it sends a message would block the engine.
"""

import select
import socket
import struct
import threading
from collections import deque

import numpy as np

from wingbeat.cluster.channels.tcp.remote_handshake import hang_up

_START = struct.Struct("<Q")
START_BYTES = _START.size
_LINGER_S = 1.0
_KEEPALIVE_S, _KEEPALIVE_PROBES, _UNACKNOWLEDGED_MS = 5, 3, 15_000
"""A node that fails does not close its connections. An idle pair notices the failure within 20 s by keepalive, and a
busy pair by rounds without an answer.
"""


class FrameError(RuntimeError):
    """A received frame is not the one that is due now, or its shape does not fit this channel."""


class Connection:
    """Frames of one round each, for use by one thread.

    Args:
        sock: connected socket; both of its ends have been authenticated.
        most_bytes: size of the longest body in either direction.
    """

    def __init__(self, sock: socket.socket, most_bytes: int) -> None:
        _tune(sock)
        self._sock = sock
        self._most_bytes = most_bytes
        # Two buffers are used alternately, because the rest of a frame may still be unsent when the next frame is
        # packed.
        self._out = [np.empty(START_BYTES + most_bytes, dtype=np.uint8) for _ in range(2)]
        self._in = np.empty(START_BYTES + most_bytes, dtype=np.uint8)
        self._in_view = self._in.data
        self._num_sent = 0
        self._have, self._wanted = 0, START_BYTES
        self._sender = _Sender(sock)
        self._hang_up = select.poll()
        self._hang_up.register(sock, select.POLLRDHUP)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self.closed = False

    @property
    def body(self) -> np.ndarray:
        """Buffer for the body of the next `send`, uint8 [most_bytes]. The frame after the next uses the same buffer."""
        return self._out[self._num_sent % 2][START_BYTES:]

    def send(self, num_bytes: int) -> None:
        """Send the first `num_bytes` of `body`, in one write if the kernel takes all of these bytes; never blocks."""
        if self.closed:
            return
        data = self._out[self._num_sent % 2].data
        self._num_sent += 1
        _START.pack_into(data, 0, num_bytes)
        self._sender.send(data[: START_BYTES + num_bytes])

    def receive(self) -> np.ndarray | None:
        """The body of the next frame, valid until the next call; None if the frame is not complete. Never blocks.

        Raises:
            FrameError: the received bytes claim a body longer than this connection allows.
            ConnectionError: the connection has ended.
        """
        if self.closed:
            raise ConnectionError("the connection is closed")
        while self._have < self._wanted:
            try:
                count = self._sock.recv_into(self._in_view[self._have : self._wanted])
            except BlockingIOError:
                return None
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if not count:
                raise ConnectionError("the other end has closed the connection")
            self._have += count
            if self._have == START_BYTES == self._wanted:
                (num_bytes,) = _START.unpack_from(self._in_view)
                if num_bytes > self._most_bytes:
                    raise FrameError(f"a frame claims {num_bytes} bytes, at most {self._most_bytes} fit")
                self._wanted += num_bytes
        end = self._wanted
        self._have, self._wanted = 0, START_BYTES
        return self._in[START_BYTES:end]

    def alive(self) -> bool:
        """Whether the connection is open and the other end still there. Takes about a microsecond."""
        return not self.closed and not self._hang_up.poll(0)

    @property
    def descriptor(self) -> int:
        """File descriptor of the socket, readable while there is something to receive."""
        return self._sock.fileno()

    def wait_readable(self, timeout_s: float) -> None:
        """Return once there is something to receive, or after `timeout_s`."""
        self._readable.poll(1e3 * timeout_s)

    def close(self) -> None:
        """Close the connection; does nothing when repeated."""
        if self.closed:
            return
        self.closed = True
        hang_up(self._sock)
        self._sender.close()
        self._sock.close()


class _Sender:
    """Writes frames in order.

    If the kernel does not take a whole frame at once, a thread sends the rest while the caller continues. This is usual
    for the hidden states of a long prompt, which are many times larger than the kernel's buffer.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._changed = threading.Condition()
        self._rest: deque[memoryview] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    def send(self, data: memoryview) -> None:
        with self._changed:
            if not self._rest:
                data = data[self._write(data) :]
            if not data or self._closed:
                return
            self._rest.append(data)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="wingbeat-remote-sender", daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_LINGER_S)

    def _write(self, data: memoryview) -> int:
        """Write to the socket; return the number of bytes that the kernel took.

        On a broken connection all bytes count as taken; the reading side of this connection reports the break.
        """
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _run(self) -> None:
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rest or self._closed)
                if self._closed:
                    return
                data = self._rest[0]
            # While `_rest` is not empty, no other thread writes to the socket, so the lock is not needed here.
            writable.poll(1e3 * _LINGER_S)
            data = data[self._write(data) :]
            with self._changed:
                if data:
                    self._rest[0] = data
                else:
                    self._rest.popleft()


def _tune(sock: socket.socket) -> None:
    """Set the socket to send each frame at once, and to end the connection if the other node is silent."""
    sock.setblocking(False)
    if sock.family != socket.AF_INET:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
