"""One authenticated TCP connection: numbered, signed frames, of which a wrong one ends it.

    frame: magic, length of the body, number, body, HMAC-SHA256 of all before it

Nothing of a frame is looked at before all of it is there and its signature fits. Bodies are bounded, and numbers count
up by one, so nothing can be truncated, replayed, reordered or left out without the connection's end.
"""

import contextlib
import hmac
import select
import socket
import struct
import threading
from collections import deque

import numpy as np

_MAGIC = 0x52424757
_START = struct.Struct("<IIQ")
START_BYTES = _START.size
SIGNATURE_BYTES = 32
_LINGER_S = 1.0
_KEEPALIVE_S, _KEEPALIVE_PROBES, _UNACKNOWLEDGED_MS = 5, 3, 15_000
"""A node that is gone ends no connection: an idle pair learns of it within 20 s, a busy one by its rounds."""


class FrameError(RuntimeError):
    """A frame cannot be from this channel's other end, or has another shape than the channel's."""


class Connection:
    """Frames of one round each. One thread uses it.

    Args:
        sock: connected, both ends of which have proved themselves.
        own_key, peer_key: sign what this end sends, and what comes.
        most_out, most_in: bytes of the longest body each way.
    """

    def __init__(self, sock: socket.socket, own_key: bytes, peer_key: bytes, most_out: int, most_in: int) -> None:
        _tune(sock)
        self._sock = sock
        self._own_key, self._peer_key = own_key, peer_key
        self._most_in = most_in
        # Two, as the rounds alternate: the rest of one may still be on its way when the next is packed.
        self._out = [np.empty(START_BYTES + most_out + SIGNATURE_BYTES, dtype=np.uint8) for _ in range(2)]
        self._in = np.empty(START_BYTES + most_in + SIGNATURE_BYTES, dtype=np.uint8)
        self._in_view = self._in.data
        self._num_sent = self._num_received = 0
        self._have, self._wanted = 0, START_BYTES
        self._sender = _Sender(sock)
        self._hang_up = select.poll()
        self._hang_up.register(sock, select.POLLRDHUP)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self.closed = False

    @property
    def body(self) -> np.ndarray:
        """Room for the body that `send` sends next, uint8 [most_out]; free again two frames later."""
        return self._out[self._num_sent % 2][START_BYTES:-SIGNATURE_BYTES]

    def send(self, num_bytes: int) -> None:
        """Send so much of `body`, as one write where the kernel takes it all; never waits."""
        if self.closed:
            return
        data = self._out[self._num_sent % 2].data
        self._num_sent += 1
        end = START_BYTES + num_bytes
        _START.pack_into(data, 0, _MAGIC, num_bytes, self._num_sent)
        data[end : end + SIGNATURE_BYTES] = hmac.digest(self._own_key, data[:end], "sha256")
        self._sender.send(data[: end + SIGNATURE_BYTES])

    def receive(self) -> np.ndarray | None:
        """The body of the next frame, if it has come whole; it holds until the next call. Never waits.

        Raises:
            FrameError: what comes is no frame of this connection.
            ConnectionError: there will be no further one.
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
                self._wanted += self._read_start() + SIGNATURE_BYTES
        end = self._wanted - SIGNATURE_BYTES
        signature = hmac.digest(self._peer_key, self._in_view[:end], "sha256")
        if not hmac.compare_digest(signature, self._in_view[end : self._wanted]):
            raise FrameError("a frame has a wrong signature")
        self._num_received += 1
        self._have, self._wanted = 0, START_BYTES
        return self._in[START_BYTES:end]

    def alive(self) -> bool:
        """False once the other end has closed it or is gone. About a microsecond."""
        return not self.closed and not self._hang_up.poll(0)

    def wait_readable(self, timeout_s: float) -> None:
        """Return once there is something to receive, or after the time."""
        self._readable.poll(1e3 * timeout_s)

    def close(self) -> None:
        """Let go of it; harmless a second time."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError):  # the other end was quicker
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sender.close()
        self._sock.close()

    def _read_start(self) -> int:
        magic, num_bytes, number = _START.unpack_from(self._in_view)
        if magic != _MAGIC or num_bytes > self._most_in:
            raise FrameError(f"a frame claims {num_bytes} bytes, at most {self._most_in} fit")
        if number != self._num_received + 1:
            raise FrameError(f"frame {number} came where {self._num_received + 1} was due")
        return num_bytes


class _Sender:
    """Writes frames in order: what the kernel does not take at once goes by a thread, which starts when it is needed.

    The caller computes meanwhile: a long prompt's hidden states are many times the kernel's buffer.
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
        """How many bytes the kernel took; a broken connection takes all, and its reader learns of it."""
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
            # Nobody else writes while there is a rest.
            writable.poll(1e3 * _LINGER_S)
            data = data[self._write(data) :]
            with self._changed:
                if data:
                    self._rest[0] = data
                else:
                    self._rest.popleft()


def _tune(sock: socket.socket) -> None:
    """A message is one write, to be sent at once; silence of a whole node ends the connection."""
    sock.setblocking(False)
    if sock.family != socket.AF_INET:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
