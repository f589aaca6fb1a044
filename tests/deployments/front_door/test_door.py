"""A listening socket that outlives its server: no client is refused while a server follows another."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from wingbeat.deployments.bound_socket import bind
from wingbeat.deployments.front_door import door as doors
from wingbeat.deployments.front_door.door import Door, DoorError, DoorKey

SERVER = """
import sys
from wingbeat.deployments.front_door.door import DoorKey
listener = DoorKey(*sys.argv[1:]).receive_socket()
listener.listen(100)
print("up", flush=True)
while True:
    connection, _ = listener.accept()
    if connection.recv(100) == b"answer":
        connection.sendall(b"answered")
    else:
        kept = connection
"""


@pytest.fixture
def door() -> Iterator[Door]:
    """At a port that the kernel chooses."""
    with Door("127.0.0.1", 0) as opened:
        yield opened


def server(door: Door) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", SERVER, *door.key], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    return process


def caller(door: Door, says: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", door.port), timeout=30)
    connection.sendall(says)
    return connection


def test_before_the_first_server_connections_are_refused(door: Door):
    with pytest.raises(ConnectionRefusedError):
        caller(door, b"answer")


@pytest.mark.slow
def test_kills_under_connections_of_every_kind_refuse_nobody(door: Door):
    for _ in range(5):
        with server(door) as process:
            idle, half, active = caller(door, b"idle"), caller(door, b"half"), caller(door, b"active")
            half.shutdown(socket.SHUT_WR)
            with caller(door, b"answer") as served:
                assert served.recv(100) == b"answered"
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        waiting = caller(door, b"answer")
        with server(door) as process:
            assert waiting.recv(100) == b"answered"
            process.kill()
        for connection in (idle, half, active, waiting):
            connection.close()


def test_a_closed_door_lends_nothing_and_its_port_is_free_at_once(door: Door):
    with server(door) as process:
        with caller(door, b"answer") as served:
            served.recv(100)
        port, key = door.port, door.key
        door.close()
        with pytest.raises(DoorError, match="has not sent its server socket"):
            key.receive_socket()
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", port)
        process.kill()
        process.wait()
    bind("127.0.0.1", port).close()


def test_nobody_else_gets_the_socket_nor_takes_the_launchers_place(door: Door, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doors.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(DoorError, match="another user's process"):
        door.key.receive_socket()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{door.key.name}")
        assert socket.recv_fds(stranger, 1, 1)[:2] == (b"", [])


def test_a_launcher_that_does_not_answer_is_an_error_and_no_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doors, "HAND_OVER_S", 0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind("\0wingbeat-test-silent")
        silent.listen()
        with pytest.raises(DoorError, match="timed out"):
            DoorKey("wingbeat-test-silent", "127.0.0.1").receive_socket()
