"""How the two ends of a remote channel prove to each other that they hold its secret, and agree on session keys.

    verifier -> drafter  GREETING  magic, verifier's nonce
    drafter -> verifier  HELLO     magic, drafter's nonce, incarnation, digest of the layout, proof
    verifier -> drafter  VERDICT   code, latest incarnation, proof

A proof is an HMAC by the secret over a label of its side, both nonces and all else of the message, so none can be made
without the secret, reflected, or used again on another connection. Each direction's frames are signed by a key of their
own, made from the secret and both nonces.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from enum import IntEnum
from typing import NamedTuple

from wingbeat.cluster.channels.header import ChannelError
from wingbeat.runtime.protocol.messages import ChannelSpec

VERSION = 1
SECRET_BYTES = 32
PROOF_BYTES = 32
_MAGIC = b"WINGBR" + VERSION.to_bytes(2, "little")
_GREETING = struct.Struct("<8s32s")
_HELLO = struct.Struct("<8s32sQ32s32s")
_VERDICT = struct.Struct("<QQ32s")
HELLO_BYTES = _HELLO.size


class Code(IntEnum):
    """What the verifier answers to a drafter that has proved the secret."""

    WELCOME = 0
    OLD_INCARNATION = 1
    OTHER_LAYOUT = 2


class SessionKeys(NamedTuple):
    """Of the frames of one connection, by the side that sends them."""

    verifier: bytes
    drafter: bytes


class Hello(NamedTuple):
    """A drafter that has proved the secret."""

    incarnation: int
    same_layout: bool
    keys: SessionKeys
    nonces: bytes


def new_secret() -> bytes:
    """Of one channel."""
    return secrets.token_bytes(SECRET_BYTES)


def greeting() -> bytes:
    """The verifier's first message, with a fresh nonce."""
    return _GREETING.pack(_MAGIC, secrets.token_bytes(32))


def read_hello(message: bytes, greeted: bytes, secret: bytes, spec: ChannelSpec) -> Hello | None:
    """What a drafter says of itself, or None where it does not prove the secret.

    Args:
        message: HELLO_BYTES long.
        greeted: the greeting that it answers.
    """
    magic, nonce, incarnation, digest, proof = _HELLO.unpack(message)
    nonces = greeted[len(_MAGIC) :] + nonce
    expected = _proof(secret, b"drafter", nonces, message[: -len(proof)])
    if magic != _MAGIC or not hmac.compare_digest(proof, expected):
        return None
    return Hello(incarnation, digest == layout_digest(spec), session_keys(secret, nonces), nonces)


def verdict(code: Code, latest: int, hello: Hello, secret: bytes) -> bytes:
    """The verifier's answer.

    Args:
        latest: incarnation that has attached last.
    """
    start = struct.pack("<QQ", code, latest)
    return start + _proof(secret, b"verifier", hello.nonces, start)


def introduce(sock: socket.socket, secret: bytes, spec: ChannelSpec, incarnation: int, timeout_s: float) -> SessionKeys:
    """The drafter's part of it all, on a fresh connection.

    Raises:
        ChannelError: the other end does not hold the secret or refuses this one; says why.
        OSError: the connection broke, or nothing came in time.
    """
    deadline = time.monotonic() + timeout_s
    magic, theirs = _GREETING.unpack(_receive(sock, _GREETING.size, deadline))
    if magic != _MAGIC:
        raise ChannelError("the other end of the remote channel is no verifier of this version of wingbeat")
    nonce = secrets.token_bytes(32)
    start = struct.pack("<8s32sQ32s", _MAGIC, nonce, incarnation, layout_digest(spec))
    sock.sendall(start + _proof(secret, b"drafter", theirs + nonce, start))
    answer = _receive(sock, _VERDICT.size, deadline)
    code, latest, proof = _VERDICT.unpack(answer)
    if not hmac.compare_digest(proof, _proof(secret, b"verifier", theirs + nonce, answer[:-PROOF_BYTES])):
        raise ChannelError("the other end of the remote channel does not hold its secret")
    if code == Code.OLD_INCARNATION:
        raise ChannelError(f"incarnation {incarnation} cannot attach, it must be above {latest}")
    if code != Code.WELCOME:
        raise ChannelError("the verifier's channel has other shapes than this drafter's: both need one version")
    return session_keys(secret, theirs + nonce)


def session_keys(secret: bytes, nonces: bytes) -> SessionKeys:
    """Keys that no other connection has."""
    return SessionKeys(*(_proof(secret, b"frames of the " + side, nonces) for side in (b"verifier", b"drafter")))


def layout_digest(spec: ChannelSpec) -> bytes:
    """Equal where both ends lay out the same messages."""
    return hashlib.sha256(repr(spec).encode()).digest()


def _proof(secret: bytes, label: bytes, nonces: bytes, message: bytes = b"") -> bytes:
    return hmac.digest(secret, label.ljust(32, b"\0") + nonces + message, "sha256")


def _receive(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """So many bytes and no more: what follows is frames."""
    data = b""
    while len(data) < num_bytes:
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ChannelError("the verifier has closed the remote channel or does not accept this drafter's secret")
        data += part
    return data
