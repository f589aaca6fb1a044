"""A remote channel's connection ends at whatever is not its other end's, and nothing of that is taken in."""

import contextlib
import dataclasses
import os
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing import connection as standard

import numpy as np
import pytest
import torch

from tests.cluster.peers import LONG_S, SHORT_S, SPEC, eventually, publish, round_trip, serve_in_thread
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.cluster.channels.header import ChannelError
from wingbeat.cluster.channels.tcp import remote_handshake
from wingbeat.cluster.channels.tcp.remote_address import RemoteAddress
from wingbeat.cluster.channels.tcp.remote_channel import (
    MOST_PENDING,
    RemoteChannel,
    RemoteDrafterSide,
    RemoteVerifierSide,
)
from wingbeat.cluster.channels.tcp.remote_connection import START_BYTES, Connection, FrameError
from wingbeat.cluster.channels.tcp.remote_frames import _Round
from wingbeat.cluster.channels.tcp.remote_handshake import new_secret
from wingbeat.runtime.protocol.messages import REPLY_WORDS

MESSAGE_BYTES = 256
FRAME = b"trees of round one, as bytes"


@pytest.fixture
def channel() -> Iterator[RemoteChannel]:
    channel = RemoteChannel("127.0.0.1", SPEC)
    yield channel
    channel.verifier_end.close()


class Stranger(socket.socket):
    """A connection that has been challenged."""

    def __init__(self, channel: RemoteChannel) -> None:
        super().__init__()
        self.connect((channel.name.host, channel.name.port))
        self.challenge = hear(self)
        self.settimeout(LONG_S)


def hear(sock: socket.socket) -> bytes:
    """The next message of the standard library's kind."""
    with standard.Connection(os.dup(sock.fileno())) as wire:
        assert wire.poll(LONG_S)
        return wire.recv_bytes(MESSAGE_BYTES)


def say(sock: socket.socket, message: bytes) -> None:
    """Send one."""
    with standard.Connection(os.dup(sock.fileno())) as wire:
        wire.send_bytes(message)


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end closes without another word but, at most, that of a failure."""
    with contextlib.suppress(ConnectionError):
        return b"".join(iter(lambda: sock.recv(99), b"")) in (b"", b"\0\0\0\x09#FAILURE#")
    return True


def works(channel: RemoteChannel, incarnation: int) -> bool:
    """Whether a drafter that holds the secret attaches, and answers."""
    thread = serve_in_thread(RemoteChannel.attach(channel.name, incarnation), "answer")
    answered = round_trip(channel.verifier_end) is not None
    channel.verifier_end.close()
    thread.join(LONG_S)
    return answered


HTTP = b"GET / HTTP/1.1\r\n" * 8
NOISE = [bytes(64), HTTP, struct.pack("!i", 16) + bytes(16), struct.pack("!i", -1) + b"\xff" * 8, b"\xff" * 64]


@pytest.mark.parametrize("said", NOISE, ids=["zeros", "http", "no-proof", "endless", "length below zero"])
def test_a_stranger_is_closed_and_disturbs_nobody(channel: RemoteChannel, said: bytes) -> None:
    with Stranger(channel) as sock:
        sock.sendall(said)
        assert is_closed(sock)
    assert channel.verifier_end.incarnation == 0
    assert works(channel, 1)


def test_a_drafter_of_another_secret_is_closed(channel: RemoteChannel) -> None:
    with pytest.raises(ChannelError, match="does not accept this drafter's secret"):
        RemoteChannel.attach(channel.name._replace(secret=new_secret()), 1)
    assert works(channel, 1)


def test_a_proof_overheard_is_none_on_another_connection(channel: RemoteChannel) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tap, ThreadPoolExecutor(1) as pool:
        drafter = pool.submit(RemoteChannel.attach, channel.name._replace(port=tap.getsockname()[1]), 1)
        to_drafter, _ = tap.accept()
        with Stranger(channel) as first, Stranger(channel) as second, to_drafter:
            say(to_drafter, first.challenge)
            overheard = hear(to_drafter)
            say(second, overheard)
            assert is_closed(second)
            say(first, overheard)
            assert hear(first) == b"#WELCOME#"
        with pytest.raises(ChannelError, match="has closed"):
            drafter.result()


def test_a_verifier_that_does_not_hold_the_secret_is_refused() -> None:
    impostor = RemoteChannel("127.0.0.1", SPEC)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        drafter = pool.submit(RemoteChannel.attach, impostor.name._replace(port=server.getsockname()[1]), 1)
        sock, _ = server.accept()
        with sock, standard.Connection(os.dup(sock.fileno())) as wire:
            wire.send_bytes(b"#CHALLENGE#" + bytes(20))
            wire.recv_bytes(MESSAGE_BYTES)
            wire.send_bytes(b"#WELCOME#")
            with pytest.raises(AuthenticationError):
                standard.answer_challenge(wire, new_secret())
            with pytest.raises(ChannelError, match="does not hold its secret"):
                drafter.result()
    impostor.verifier_end.close()


def test_a_verifier_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_handshake, "HANDSHAKE_S", SHORT_S)
    with socket.create_server(("127.0.0.1", 0)) as server:
        name = RemoteAddress("127.0.0.1", server.getsockname()[1], new_secret(), pickle.dumps(SPEC))
        with pytest.raises(ChannelError, match="has closed"):
            RemoteChannel.attach(name, 1)


def test_ends_of_other_shapes_do_not_meet(channel: RemoteChannel) -> None:
    other = pickle.dumps(dataclasses.replace(SPEC, num_nodes=SPEC.num_nodes + 1))
    with pytest.raises(ChannelError, match="other shapes"):
        RemoteChannel.attach(channel.name._replace(spec=other), 1)
    assert works(channel, 1)


@pytest.mark.parametrize("incarnation", [0, 3, 2**40])
def test_an_incarnation_attaches_once_and_never_goes_back(channel: RemoteChannel, incarnation: int) -> None:
    drafter = RemoteChannel.attach(channel.name, 3)
    with pytest.raises(ChannelError, match=f"incarnation {incarnation} cannot attach"):
        RemoteChannel.attach(channel.name, incarnation)
    assert channel.verifier_end.incarnation == 3
    assert not drafter.closed
    drafter.close()


def test_the_silent_are_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_handshake, "HANDSHAKE_S", SHORT_S)
    channel = RemoteChannel("127.0.0.1", SPEC)
    with Stranger(channel) as sock:
        sock.sendall(b"\0\0")
        assert is_closed(sock)
    channel.verifier_end.close()


def test_a_crowd_of_silent_strangers_keeps_no_drafter_out(channel: RemoteChannel) -> None:
    crowd = [Stranger(channel) for _ in range(MOST_PENDING + 3)]
    assert all(is_closed(sock) for sock in crowd[:3])
    assert works(channel, 1)
    for sock in crowd:
        sock.close()


def test_a_stranger_for_whom_there_is_no_thread_is_closed_and_the_next_one_met(
    channel: RemoteChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with socket.create_connection((channel.name.host, channel.name.port), LONG_S) as sock:
            assert sock.recv(1) == b""
    assert works(channel, 1)


@pytest.fixture
def wire() -> Iterator[tuple[socket.socket, Connection]]:
    """A raw end, and a connection at the other."""
    raw, sock = socket.socketpair()
    connection = Connection(sock, 100)
    yield raw, connection
    connection.close()
    raw.close()


def frame(body: bytes = FRAME) -> bytes:
    """Bytes that a connection sends for `body`."""
    raw, sock = socket.socketpair()
    connection = Connection(sock, len(body))
    connection.body[:] = np.frombuffer(body, np.uint8)
    connection.send(len(body))
    sent = raw.recv(START_BYTES + len(body), socket.MSG_WAITALL)
    connection.close()
    raw.close()
    return sent


def test_frames_arrive_in_pieces_of_any_size(wire: tuple[socket.socket, Connection]) -> None:
    raw, connection = wire
    first, second = frame(), frame(FRAME[::-1])
    for byte in first[:-1]:
        raw.sendall(bytes([byte]))
        assert connection.receive() is None
    raw.sendall(first[-1:] + second)
    assert [connection.receive().tobytes() for _ in range(2)] == [FRAME, FRAME[::-1]]
    assert connection.receive() is None


@pytest.mark.parametrize("sent", [frame(b"x" * 101), b"\xa5" * 200], ids=["too long", "noise"])
def test_a_frame_that_does_not_fit_is_refused(wire: tuple[socket.socket, Connection], sent: bytes) -> None:
    raw, connection = wire
    raw.sendall(sent)
    with pytest.raises(FrameError):
        connection.receive()


@pytest.mark.parametrize("count", [0, 5, START_BYTES, START_BYTES + 4, START_BYTES + len(FRAME) - 1])
def test_a_truncated_frame_is_never_a_frame(wire: tuple[socket.socket, Connection], count: int) -> None:
    raw, connection = wire
    raw.sendall(frame()[:count])
    assert connection.receive() is None
    assert connection.alive()
    raw.close()
    assert not connection.alive()
    with pytest.raises(ConnectionError):
        connection.receive()


def reply_body(*, round_number: int = 1, incarnation: int = 2, count: int = 1, width: int = 1, slot: int = 0) -> bytes:
    """A well-formed answer of one bare root, or one with something wrong."""
    numbers = [round_number, incarnation, *[0] * (REPLY_WORDS - 2), count, width, slot]
    return np.array(numbers).tobytes() + bytes(3 * 8 + 3 * 8 + 4)


BAD_REPLIES = {
    "empty": b"",
    "short": reply_body()[:-1],
    "long": reply_body() + b"\0",
    "round to come": reply_body(round_number=2),
    "round before": reply_body(round_number=0),
    "other incarnation": reply_body(incarnation=1),
    "no such slot": reply_body(slot=SPEC.num_slots),
    "slot below zero": reply_body(slot=-1),
    "too many trees": reply_body(count=SPEC.num_slots + 1),
    "trees below zero": reply_body(count=-1),
    "too wide": reply_body(width=SPEC.num_nodes + 1),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["well-formed", *BAD_REPLIES])
def test_an_answer_of_another_shape_ends_the_connection_and_is_no_answer(channel: RemoteChannel, name: str) -> None:
    drafter, verifier = RemoteChannel.attach(channel.name, 2), channel.verifier_end
    verifier.peer_alive()
    round_number = publish(verifier)
    body = BAD_REPLIES.get(name, reply_body())
    send_body(drafter, body)
    reply = verifier.wait_reply(round_number, LONG_S)
    assert (reply is not None) == verifier.peer_alive() == (name == "well-formed")
    if reply is None:
        assert drafter.wait_outcome(LONG_S) is None or eventually(lambda: not drafter.poll_outcome() and drafter.closed)
    drafter.close()
    assert works(channel, 3)


def outcome_body(header: tuple[int, ...] = (1,), slot: int = 0, tail: bytes = b"") -> bytes:
    """A round of one proposal and nothing else, or one with something wrong."""
    outcome = InProcessChannel(SPEC).verifier_end.acquire_outcome(0.0)
    outcome.proposal_slots.fill_(slot)
    outcome.header[: len(header)] = torch.tensor(header)
    num_extents = bytes(2 * 8)
    return b"".join(run.tobytes() for run in _Round(outcome, SPEC).small) + num_extents + tail


BAD_OUTCOMES = {
    "empty": b"",
    "short": outcome_body()[:-1],
    "long": outcome_body(tail=b"\0"),
    "round zero": outcome_body((0,)),
    "too many decodes": outcome_body((1, SPEC.num_slots + 1)),
    "decodes below zero": outcome_body((1, -1)),
    "too many chunks": outcome_body((1, 0, SPEC.num_slots + 1)),
    "too many proposals": outcome_body((1, 0, 0, SPEC.num_slots + 1)),
    "no such slot": outcome_body((1, 0, 0, 1), slot=SPEC.num_slots),
    "slot below zero": outcome_body((1, 0, 0, 1), slot=-1),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["well-formed", *BAD_OUTCOMES])
def test_a_round_of_another_shape_ends_the_connection_and_is_never_seen(channel: RemoteChannel, name: str) -> None:
    drafter = RemoteChannel.attach(channel.name, 1)
    assert channel.verifier_end.incarnation == 1
    send_body(channel.verifier_end, BAD_OUTCOMES.get(name, outcome_body((1, 0, 0, 1))))
    outcome = drafter.wait_outcome(LONG_S)
    assert (outcome is not None) == (not drafter.closed) == (name == "well-formed")
    assert eventually(channel.verifier_end.peer_alive) if outcome is not None else not channel.verifier_end.peer_alive()
    drafter.close()


@pytest.mark.parametrize("second", [1, 3], ids=["again", "skipped"])
def test_rounds_come_one_after_the_other(channel: RemoteChannel, second: int) -> None:
    drafter = RemoteChannel.attach(channel.name, 1)
    assert channel.verifier_end.incarnation == 1
    send_body(channel.verifier_end, outcome_body((1,)))
    assert drafter.wait_outcome(LONG_S) is not None
    send_body(channel.verifier_end, outcome_body((second,)))
    assert eventually(lambda: drafter.poll_outcome() is None and drafter.closed)
    drafter.close()


def test_no_more_rounds_come_than_have_buffers(channel: RemoteChannel) -> None:
    drafter = RemoteChannel.attach(channel.name, 1)
    assert channel.verifier_end.incarnation == 1
    for round_number in (1, 2, 3):
        send_body(channel.verifier_end, outcome_body((round_number,)))
    assert eventually(lambda: drafter.poll_outcome() is None and drafter.closed)
    drafter.close()


def send_body(end: RemoteDrafterSide | RemoteVerifierSide, body: bytes) -> None:
    """A frame as it should be, whatever it holds."""
    connection = end._link.connection
    connection.body[: len(body)] = np.frombuffer(body, np.uint8)
    connection.send(len(body))
