"""Forked processes share one import, end with their server, and are distinguished from later ones."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import wait_until
from wingbeat.cluster import fork_server
from wingbeat.cluster.channels.doorbell import PeerProcess, process_start
from wingbeat.cluster.fork_server import ForkServer
from wingbeat.cluster.mps import under_mps

TARGET = "tests.cluster.forked:answer"


@pytest.fixture
def server():
    made = ForkServer(TARGET)
    yield made
    made.close()


def test_every_process_is_its_own_and_none_imports_again(server: ForkServer):
    forked = [server.fork() for _ in range(3)]
    answers = [one.connection.recv() for one in forked]
    assert [pid for _, pid in answers] == [one.pid for one in forked]
    assert len({one.pid for one in forked}) == 3
    assert len({imported_by for imported_by, _ in answers}) == 1
    assert answers[0][0] not in {os.getpid(), *(one.pid for one in forked)}


@pytest.mark.parametrize("how", ["killed", "stopped", "fails"])
def test_the_end_of_one_is_seen_and_another_one_can_be_had(server: ForkServer, how: str):
    first = server.fork()
    first.connection.recv()
    peer = PeerProcess(first.pid, process_start(first.pid))
    if how == "fails":
        first.connection.send("fail")
    else:
        os.kill(first.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    if how != "stopped":
        with pytest.raises(EOFError):
            first.connection.recv()
    first.kill()
    wait_until(lambda: not peer.alive())
    first_again = server.fork()
    assert first_again.connection.recv()[1] == first_again.pid != first.pid
    first.kill()
    assert PeerProcess(first_again.pid, process_start(first_again.pid)).alive()


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["killed", "closed", "stopped", "alone"])
def test_under_mps_a_process_is_asked_before_it_is_killed_by_whoever_ends_it(monkeypatch, tmp_path: Path, how: str):
    if how != "alone":
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if how == "killed":  # beside other tests two seconds may be too short
        monkeypatch.setattr(fork_server, "ASKED_S", 30.0)
    server = ForkServer("tests.cluster.forked:rest")
    forked, rested = server.fork(), tmp_path / "rested"
    forked.connection.send(str(rested))
    peer = PeerProcess(forked.connection.recv(), process_start(forked.pid))
    if how == "stopped":
        os.kill(forked.pid, signal.SIGSTOP)
    if how == "closed":
        server.close()
    else:
        forked.kill()
    wait_until(lambda: not peer.alive())
    assert rested.exists() == (how in ("killed", "closed"))
    server.close()


def test_the_daemons_pipe_tells_of_mps(monkeypatch, tmp_path: Path):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    assert not under_mps(tmp_path)
    (tmp_path / "control").touch()
    assert under_mps(tmp_path)


def test_a_target_that_cannot_be_imported_ends_the_server():
    server = ForkServer("tests.cluster.forked:nothing")
    with pytest.raises(EOFError, match="has ended"):
        server.fork()
    server.close()


def test_what_was_forked_ends_with_the_process_that_asked_even_where_it_is_stopped():
    # A server that nobody holds any more is closed, and what it forked ends.
    code = f"import time; from wingbeat.cluster.fork_server import ForkServer; server = ForkServer({TARGET!r});"
    code += "one = server.fork(); print(one.pid, one.connection.recv()[0], flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        peers = [PeerProcess(int(pid), process_start(int(pid))) for pid in parent.stdout.readline().split()]
        os.kill(peers[0].pid, signal.SIGSTOP)
        parent.kill()
    for peer in peers:
        wait_until(lambda peer=peer: not peer.alive())


def test_a_server_that_does_not_answer_is_ended(server: ForkServer):
    forked = server.fork()
    peers = [PeerProcess(pid, process_start(pid)) for pid in (server._process.pid, forked.pid)]
    os.kill(peers[0].pid, signal.SIGSTOP)
    server._control.settimeout(0.2)
    with pytest.raises(EOFError, match="has not answered"):
        server.fork()
    for peer in peers:
        wait_until(lambda peer=peer: not peer.alive())
    with pytest.raises(EOFError):
        server.fork()
