"""Waiting on a counter and on the life of a process."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from wingbeat.cluster.channels import doorbell
from wingbeat.cluster.channels.doorbell import (
    TIMER_SLACK_NS,
    YIELD_S,
    Bell,
    Doorbell,
    PeerProcess,
    PumpDoorbell,
    poll,
    process_start,
)

LONG_S = 30.0
PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30
PF_EXITING = 0x4


def make_words() -> memoryview:
    return memoryview(bytearray(64)).cast("q")


@pytest.fixture
def bell() -> Bell:
    return Bell(make_words(), 3)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_what_is_ready_is_seen_without_any_time(bell: Bell) -> None:
    assert Doorbell(bell).wait(lambda: True, 0.0)
    assert not Doorbell(bell).wait(lambda: False, 0.0)
    assert not Doorbell(bell).wait(lambda: False, 0.01)


def test_a_peer_that_is_gone_ends_the_wait_but_not_its_last_word(bell: Bell) -> None:
    def gone() -> bool:
        bell.words[bell.index] = 1  # it counted, then died
        return True

    assert not Doorbell(bell).wait(lambda: False, LONG_S, gone=lambda: True)
    assert Doorbell(bell).wait(lambda: bell.words[bell.index] == 1, LONG_S, gone=gone)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("seen", [4, -1, 2**31, 2**40 + 4])
def test_nobody_sleeps_on_a_counter_that_has_moved(bell: Bell, seen: int) -> None:
    bell.words[bell.index] = seen + 1
    for _ in range(100):
        bell.sleep(seen, 0.9)


@pytest.mark.timeout(20)
def test_a_ring_ends_a_sleep(bell: Bell) -> None:
    """Hundred turns of two threads that sleep for up to 0.9 s at a time would outlast the test if rings got lost."""
    other = Bell(bell.words, 5)

    def take_turns(mine: Bell, theirs: Bell, lead: int) -> None:
        for turn in range(1, 101):
            if lead:
                mine.words[mine.index] = turn
                mine.ring()
            doorbell = Doorbell(theirs, max_sleep_s=0.9)
            assert doorbell.wait(lambda turn=turn: theirs.words[theirs.index] >= turn, LONG_S, quiet_since=0.0)
            if not lead:
                mine.words[mine.index] = turn
                mine.ring()

    thread = threading.Thread(target=take_turns, args=(bell, other, 0))
    thread.start()
    take_turns(other, bell, 1)
    thread.join()


@pytest.mark.parametrize("cores", [{0}, {0, 1}])
def test_only_who_has_cores_to_spare_yields(bell: Bell, cores: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    yields = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(1))
    assert not Doorbell(bell).wait(lambda: False, 0.02)
    assert bool(yields) == (len(cores) > 1)


def test_an_idle_waiter_hardly_works(bell: Bell) -> None:
    started, cpu = time.monotonic(), time.thread_time()
    for _ in range(5):
        Doorbell(bell).wait(lambda: False, 0.1, quiet_since=started - 1)
    assert time.thread_time() - cpu < 0.1 * (time.monotonic() - started)


def test_a_pump_runs_at_least_once_and_until_its_work_shows(bell: Bell) -> None:
    doorbell = PumpDoorbell(bell)
    runs = []
    doorbell.pump = lambda: runs.append(1)
    assert not doorbell.wait(lambda: False, 0.0)
    assert len(runs) == 1
    assert doorbell.wait(lambda: len(runs) == 4, LONG_S)
    assert doorbell.wait(lambda: len(runs) == 4, 0.0)


@pytest.mark.parametrize("has_pidfd", [True, False], ids=["pidfd", "proc"])
def test_a_killed_process_is_gone_although_nobody_collected_it(
    sleeper: subprocess.Popen, has_pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError

    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    peer = PeerProcess(sleeper.pid, process_start(sleeper.pid))
    assert peer.alive()
    sleeper.send_signal(signal.SIGSTOP)
    assert peer.alive()
    sleeper.kill()
    deadline = time.monotonic() + LONG_S
    while peer.alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not peer.alive()
    assert not PeerProcess(sleeper.pid, process_start(sleeper.pid)).alive()


def test_a_process_that_exits_is_not_waited_for_until_its_memory_is_taken_back(
    sleeper: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exit cannot be made to last, so the kernel's report of an exiting process is faked."""
    peer = PeerProcess(sleeper.pid, process_start(sleeper.pid))
    assert peer.works()
    before = doorbell.process_stat(sleeper.pid)
    assert not int(before[6]) & PF_EXITING
    exiting = [*before[:6], str(int(before[6]) | PF_EXITING), *before[7:]]
    monkeypatch.setattr(doorbell, "process_stat", lambda pid: exiting)
    assert wait_until_false(peer.works)
    assert peer.alive()
    monkeypatch.setattr(doorbell, "process_stat", lambda pid: before)
    assert not peer.works(), "nobody comes back from an exit"


def test_a_killed_process_of_much_memory_is_known_to_exit_before_it_is_gone() -> None:
    """A machine that stops this one meanwhile may hide it, but not every time."""
    code = "import time\nmemory = bytearray(b'x') * (1 << 28)\nprint(flush=True)\ntime.sleep(600)"
    was_there = []
    while len(was_there) < 20 and not any(was_there):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            peer = PeerProcess(process.pid, process_start(process.pid))
            assert peer.works()
            process.kill()
            assert wait_until_false(peer.works)
            was_there.append(peer.alive())
    assert any(was_there)


def test_a_process_of_which_nothing_is_told_works_while_it_is_alive(
    sleeper: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where this process may open no more files."""
    peer = PeerProcess(sleeper.pid, process_start(sleeper.pid))
    if peer._poll is None:
        pytest.skip("without pidfd_open all that is known of a process is told by /proc")
    monkeypatch.setattr(doorbell, "process_stat", lambda pid: [])
    time.sleep(2 * doorbell.EXIT_CHECK_S)
    assert peer.works()
    sleeper.kill()
    assert wait_until_false(peer.works)


def wait_until_false(asked: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LONG_S
    while asked() and time.monotonic() < deadline:
        time.sleep(0.001)
    return not asked()


def test_a_reused_process_id_is_another_process() -> None:
    for pid in (os.getpid(), os.getppid()):
        assert PeerProcess(pid, process_start(pid)).alive()
        assert not PeerProcess(pid, process_start(pid) + 1).alive()
    assert process_start(2**22 + 1) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack is Linux's")
def test_naps_between_looks_end_when_they_should():
    """The thread that waits changes its own timer slack, and no other thread's."""
    prctl = ctypes.CDLL(None).prctl

    def slack() -> int:
        return prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)

    def wait() -> None:
        assert poll(lambda: time.monotonic() > began + YIELD_S + 0.01, timeout_s=LONG_S)
        found.append(slack())

    # An earlier test may have waited in this thread.
    prctl(PR_SET_TIMERSLACK, 50_000, 0, 0, 0)
    found, began = [], time.monotonic()
    before = slack()
    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join()
    assert found == [TIMER_SLACK_NS]
    assert slack() == before > TIMER_SLACK_NS
