"""Handshake of a remote channel: both ends prove that they hold its secret, and check that their layouts match.

    each to the other     the standard library's challenge (`multiprocessing.connection`): an HMAC over a fresh nonce
    drafter -> verifier   incarnation, digest of the layout
    verifier -> drafter   code, latest incarnation

Nothing is unpickled, because messages are bytes of bounded length. The standard library's waits have no time limit, so
a timer shuts the socket down at the deadline, which ends all waits.
"""

import contextlib
import hashlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from enum import IntEnum
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

from wingbeat.cluster.channels.header import ChannelError
from wingbeat.runtime.protocol.messages import ChannelSpec

VERSION = 2
HANDSHAKE_S = 5.0
_HELLO = struct.Struct("<Q32s")
_VERDICT = struct.Struct("<QQ")


class Code(IntEnum):
    """The verifier's answer to a drafter that has proved that it holds the secret."""

    WELCOME = 0
    OLD_INCARNATION = 1
    OTHER_LAYOUT = 2


class Hello(NamedTuple):
    """Message in which a drafter that has proved the secret introduces itself."""

    incarnation: int
    same_layout: bool


def new_secret() -> bytes:
    """A new random secret of one channel."""
    return secrets.token_bytes(32)


def meet(sock: socket.socket, secret: bytes, spec: ChannelSpec) -> Hello | None:
    """Authenticate a drafter. Returns the drafter's introduction; None if it does not prove the secret in time."""
    try:
        with _limited(sock, HANDSHAKE_S) as wire:
            deliver_challenge(wire, secret)
            answer_challenge(wire, secret)
            incarnation, digest = _HELLO.unpack(wire.recv_bytes(_HELLO.size))
    except (AuthenticationError, AssertionError, EOFError, OSError, struct.error):
        return None
    return Hello(incarnation, digest == layout_digest(spec))


def answer(sock: socket.socket, code: Code, latest: int) -> None:
    """Send the verifier's answer.

    Args:
        latest: the incarnation that attached last.
    """
    # Sending a few bytes on a fresh connection never blocks. If the drafter is gone, the connection reports this later.
    with contextlib.suppress(OSError), Connection(os.dup(sock.fileno())) as wire:
        wire.send_bytes(_VERDICT.pack(code, latest))


def introduce(sock: socket.socket, secret: bytes, spec: ChannelSpec, incarnation: int) -> None:
    """The drafter's side of the handshake, on a fresh connection.

    Raises:
        ChannelError: the other end does not hold the secret, or refuses this drafter; the message gives the reason.
        OSError: the connection broke.
    """
    with _limited(sock, HANDSHAKE_S) as wire:
        try:
            answer_challenge(wire, secret)
        except (AuthenticationError, AssertionError, EOFError) as error:
            raise ChannelError(
                "the verifier has closed the remote channel or does not accept this drafter's secret"
            ) from error
        try:
            deliver_challenge(wire, secret)
            wire.send_bytes(_HELLO.pack(incarnation, layout_digest(spec)))
            code, latest = _VERDICT.unpack(wire.recv_bytes(_VERDICT.size))
        except AuthenticationError as error:
            raise ChannelError("the other end of the remote channel does not hold its secret") from error
        except (EOFError, struct.error) as error:
            raise ChannelError("the verifier has closed the remote channel") from error
    if code == Code.OLD_INCARNATION:
        raise ChannelError(f"incarnation {incarnation} cannot attach, it must be above {latest}")
    if code != Code.WELCOME:
        raise ChannelError("the verifier's channel has other shapes than this drafter's: both need one version")


def layout_digest(spec: ChannelSpec) -> bytes:
    """Digest of version and message layout, by which two ends find out whether they match."""
    return hashlib.sha256(f"{VERSION} {spec!r}".encode()).digest()


def hang_up(sock: socket.socket) -> None:
    """Shut a connection down, so that all waits on its socket end."""
    with contextlib.suppress(OSError):  # the other end has already closed the connection
        sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _limited(sock: socket.socket, timeout_s: float) -> Iterator[Connection]:
    """Context with a standard library connection over the socket, which is shut down after `timeout_s`."""
    sock.setblocking(True)
    timer = threading.Timer(timeout_s, hang_up, (sock,))
    timer.daemon = True
    timer.start()
    try:
        with Connection(os.dup(sock.fileno())) as wire:
            yield wire
    finally:
        timer.cancel()
        timer.join(timeout_s)
