"""The channel between two nodes: one TCP connection that carries the contents of the buffers as frames.

Each end has its own buffers and words in host memory, which is pinned if a GPU copies from or to it. The classes of the
ends are derived from those of `channel`, and differ only in their bells. `docs/architecture.md` specifies the wire
format.
"""

import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Callable

import torch

from wingbeat.cluster.channels.channel import DrafterSide, VerifierSide
from wingbeat.cluster.channels.doorbell import IDLE_SLEEP_S, Doorbell
from wingbeat.cluster.channels.header import NUM_WORDS, ChannelError, Word, write_owner
from wingbeat.cluster.channels.memory import (
    ChannelMemory,
    ReadyEvents,
    Region,
    buffer_bytes,
    carve,
    check_fits,
)
from wingbeat.cluster.channels.tcp.remote_address import RemoteAddress
from wingbeat.cluster.channels.tcp.remote_handshake import HANDSHAKE_S, Hello, hang_up, introduce, meet, new_secret
from wingbeat.cluster.channels.tcp.remote_links import DrafterLink, FrameBell, FrameDoorbell, VerifierLink
from wingbeat.runtime.free_memory import free_memory
from wingbeat.runtime.protocol.messages import ChannelSpec

MOST_PENDING = 16
"""Maximum number of connections that have not proved the secret yet; a further connection closes the oldest of them."""

Admit = Callable[[socket.socket, Hello], None]
"""Called in its own thread with an authenticated socket, which the callee owns from then on."""


class Listener:
    """A port of this node with its accepting thread.

    Each connection has its own thread, so that none waits for another.

    Args:
        host: address of this node to listen on.

    Raises:
        ChannelError: this process cannot listen on the address.
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
        """Connections that have not proved the secret yet, oldest first."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="wingbeat-remote-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; does nothing when repeated."""
        self._closed = True
        hang_up(self._sock)
        if threading.current_thread() is not self._thread:
            self._thread.join(HANDSHAKE_S)

    def _run(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._sock.accept()
            except OSError:  # the listener was closed, the client has left, or too many files are open
                time.sleep(0.01)
                continue
            with self._lock:
                if len(self._pending) == MOST_PENDING:
                    hang_up(self._pending.pop(0))
                self._pending.append(sock)
            try:
                threading.Thread(target=self._meet, args=(sock,), name="wingbeat-remote-stranger", daemon=True).start()
            except RuntimeError:  # with too many threads, refuse this connection but keep the listener running
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


class RemoteChannel:
    """A listening port and its verifier's end. The port is closed by `close` or on deletion."""

    def __init__(self, host: str, spec: ChannelSpec, device: torch.device | None = None) -> None:
        """Listen on an address of this node.

        Args:
            device: the verifier's GPU; None for a CPU.

        Raises:
            ChannelError: this process cannot listen on the address, or memory is too small for the buffers.
        """
        memory, secret = _memory(spec, device), new_secret()
        link = VerifierLink(memory)
        listener = Listener(host, secret, spec, link.admit)
        self.name = RemoteAddress(host, listener.port, secret, pickle.dumps(spec))
        """Address that a drafter attaches to."""
        self.verifier_end = RemoteVerifierSide(memory, link)
        self.verifier_end.on_close = weakref.finalize(self.verifier_end, _shut, listener, link, os.getpid())

    @staticmethod
    def attach(address: RemoteAddress, incarnation: int, device: torch.device | None = None) -> DrafterSide:
        """Connect to the verifier as its drafter. Any earlier incarnation is detached.

        Args:
            device: the drafter's GPU; None for a CPU.

        Raises:
            ChannelError: the other end does not answer, does not hold the secret or has another layout, or
                `incarnation` is not larger than the attached drafter's.
        """
        spec: ChannelSpec = pickle.loads(address.spec)
        # The GPU must have finished its copies out of these buffers before the next round fills them.
        memory = _memory(spec, device, None if device is None else _StreamReady(device))
        try:
            sock = socket.create_connection((address.host, address.port), HANDSHAKE_S)
        except OSError as error:
            raise ChannelError(f"the drafter cannot reach its verifier at {address}: {error}") from None
        try:
            introduce(sock, address.secret, spec, incarnation)
            return RemoteDrafterSide(memory, incarnation, sock)
        except OSError as error:
            sock.close()
            raise ChannelError(f"the drafter cannot reach its verifier at {address}: {error}") from None
        except BaseException:
            sock.close()
            raise


class RemoteVerifierSide(VerifierSide):
    """The verifier's end of a remote channel."""

    def __init__(self, memory: ChannelMemory, link: VerifierLink) -> None:
        super().__init__(memory, FrameDoorbell(link, Word.REPLIED))
        self._outcome_bell = FrameBell(link, Word.OUTCOME_SEQ)
        self._link = link

    @property
    def incarnation(self) -> int:
        """Incarnation of the attached drafter; 0 while none is attached."""
        self._link.adopt()
        return super().incarnation

    def _peer_process(self) -> VerifierLink:
        return self._link


class RemoteDrafterSide(DrafterSide):
    """The drafter's end of a remote channel, attached on construction."""

    def __init__(self, memory: ChannelMemory, incarnation: int, sock: socket.socket) -> None:
        super().__init__(memory, incarnation)
        self._link = DrafterLink(memory, sock, self._skip_to)
        self.bell = FrameBell(self._link, Word.OUTCOME_SEQ)
        self._doorbell = Doorbell(self.bell, IDLE_SLEEP_S)
        self._reply_bell = FrameBell(self._link, Word.REPLIED)
        self.on_close = weakref.finalize(self, self._link.drop)

    def round_waits(self) -> bool:
        """Whether a round has arrived that is not answered yet."""
        self._link.receive()
        return super().round_waits()

    def _skip_to(self, round_number: int) -> None:
        self._answered = round_number - 1


class _StreamReady(ReadyEvents):
    """`ReadyEvents` for a drafter on a GPU that copies from and to the channel's host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self, number: int) -> None:
        """Wait until the calling thread's current stream has done its work; the host sends the data afterwards."""
        torch.cuda.current_stream(self._device).synchronize()

    def wait(self, parity: int, writer_alive: bool) -> bool:
        """Always True, because received data are complete."""
        return True

    def finished(self, parity: int) -> bool:
        """Always True, as in `wait`."""
        return True


def _memory(spec: ChannelSpec, device: torch.device | None, reply_ready: ReadyEvents | None = None) -> ChannelMemory:
    """Allocate the buffers and words of one end.

    Raises:
        ChannelError: memory is too small for the buffers.
    """
    free_bytes = free_memory()
    if free_bytes is not None:
        check_fits(spec, free_bytes, "memory")
    words = memoryview(bytearray(8 * NUM_WORDS)).cast("q")
    write_owner(words)
    raw = torch.zeros(buffer_bytes(spec), dtype=torch.uint8, pin_memory=device is not None)
    return carve(spec, words, Region(raw), reply_ready=reply_ready)


def _shut(listener: Listener, link: VerifierLink, pid: int) -> None:
    """Close port and connection; does nothing in a forked child, which has inherited the finalizer."""
    if os.getpid() == pid:
        listener.close()
        link.close()
