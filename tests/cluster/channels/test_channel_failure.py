"""Guarantees of a channel when a process dies, stops, resumes or is replaced."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest

from tests.cluster.peers import (
    LONG_S,
    SHORT_S,
    SPEC,
    Nursery,
    ProcessRig,
    eventually,
    is_alive,
    publish,
    round_trip,
    state_of,
)
from wingbeat.cluster.channels.header import ChannelError, Word
from wingbeat.cluster.channels.segment_files import PREFIX, SHM_DIR
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.runtime.protocol.messages import ReplyHeader


@pytest.fixture(params=["shm", "fake-cuda", pytest.param("cuda_ipc", marks=pytest.mark.gpu)])
def process_rig(request: pytest.FixtureRequest, nursery: Nursery, name: str) -> Iterator[ProcessRig]:
    """A verifier's end, and drafters in processes that can be killed."""
    rig = ProcessRig(request.param, nursery, name)
    yield rig
    rig.verifier.close()


def test_an_incarnation_attaches_once_and_never_goes_back(name: str) -> None:
    channel = ShmChannel.create(name, SPEC)
    ShmChannel.attach(name, 2)
    for incarnation in (0, 1, 2, 2**40):
        with pytest.raises(ChannelError, match=f"incarnation {incarnation} cannot attach"):
            ShmChannel.attach(name, incarnation)
    assert channel.verifier_end.incarnation == 2
    channel.verifier_end.close()


def test_late_writes_of_an_old_incarnation_neither_answer_nor_block(name: str) -> None:
    channel = ShmChannel.create(name, SPEC)
    verifier, old = channel.verifier_end, ShmChannel.attach(name, 1)
    publish(verifier)
    assert old.poll_outcome() is not None
    new = ShmChannel.attach(name, 2)
    for round_number in (2, 3):
        assert publish(verifier) == round_number
        assert new.poll_outcome() is not None
        new.publish_reply()
    assert old.closed
    old.publish_reply()  # to round 1, whose buffers by now hold the answer to round 3
    assert ReplyHeader.read(verifier.wait_reply(3, LONG_S).header) == (3, 2)

    # As if the old one had been stopped between its last check and its writes.
    verifier._words[Word.REPLIED] = old._own_reply_word()
    assert verifier.wait_reply(3, SHORT_S) is None
    assert new.poll_outcome() is None
    reply = verifier.wait_reply(3, LONG_S)
    ReplyHeader(1, 1).write(reply.header)
    assert verifier.wait_reply(3, LONG_S) is None
    assert verifier.acquire_outcome(LONG_S) is not None
    verifier.close()


@pytest.mark.few(1)
def test_a_drafter_killed_in_a_round_is_noticed_and_replaced(process_rig: ProcessRig) -> None:
    process_rig.start(2, "hold")
    round_number = publish(process_rig.verifier)
    assert process_rig.verifier.peer_alive()
    os.kill(process_rig.pid, signal.SIGKILL)
    assert process_rig.verifier.wait_reply(round_number, 60.0) is None
    assert eventually(lambda: state_of(process_rig.pid) == "Z")
    assert not process_rig.verifier.peer_alive()
    for _ in range(3):
        assert round_trip(process_rig.verifier) is None
    process_rig.start(3, "answer")
    assert ReplyHeader.read(round_trip(process_rig.verifier).header).incarnation == 3


def test_a_stopped_drafter_times_out_and_cannot_disturb_its_successor(process_rig: ProcessRig) -> None:
    process_rig.start(1, "stop")
    old = process_rig.pid
    round_number = publish(process_rig.verifier)
    assert eventually(lambda: state_of(old) == "T")
    assert process_rig.verifier.wait_reply(round_number, SHORT_S) is None
    assert process_rig.verifier.peer_alive()
    process_rig.start(2, "answer")
    assert ReplyHeader.read(round_trip(process_rig.verifier).header).incarnation == 2
    os.kill(old, signal.SIGCONT)
    assert eventually(lambda: state_of(old) == "Z")
    for _ in range(4):
        assert ReplyHeader.read(round_trip(process_rig.verifier).header).incarnation == 2


def test_a_dead_verifier_closes_its_drafter_and_leaves_no_segment(nursery: Nursery, name: str) -> None:
    pid = nursery.start(name, 0, "verifier")
    path = SHM_DIR / f"{PREFIX}{name}"
    assert eventually(path.exists)
    drafter = ShmChannel.attach(name, 1)
    assert not drafter.closed
    with pytest.raises(ChannelError, match="its verifier is alive"):
        ShmChannel.create(name, SPEC)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: drafter.closed)
    assert drafter.wait_outcome(LONG_S) is None
    # An application that starts beside this test sweeps away what dead verifiers left.
    with pytest.raises(ChannelError, match=r"has closed it or is gone|does not exist"):
        ShmChannel.attach(name, 2)
    # A drafter counts a verifier as gone that has begun to exit; its name is free once the exit is over.
    assert eventually(lambda: not is_alive(pid))
    channel = ShmChannel.create(name, SPEC)
    assert ShmChannel.attach(name, 1).poll_outcome() is None
    channel.verifier_end.close()


@pytest.mark.slow
def test_a_verifier_that_ends_without_closing_unlinks_its_segment(nursery: Nursery, name: str) -> None:
    pid = nursery.start(name, 0, "leave")
    assert eventually(lambda: state_of(pid) == "Z")
    assert not (SHM_DIR / f"{PREFIX}{name}").exists()


def test_a_channel_dropped_unclosed_is_closed(name: str) -> None:
    channel = ShmChannel.create(name, SPEC)
    drafter = ShmChannel.attach(name, 1)
    del channel
    gc.collect()
    assert drafter.closed


def test_a_forked_child_does_not_take_the_segment_with_it(name: str) -> None:
    channel = ShmChannel.create(name, SPEC)
    drafter = ShmChannel.attach(name, 1)
    pid = os.fork()
    if not pid:
        channel.verifier_end.on_close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not drafter.closed
    assert (SHM_DIR / f"{PREFIX}{name}").exists()
    channel.verifier_end.close()


def test_ten_lives_of_a_channel_leave_nothing_behind(name: str) -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        channel = ShmChannel.create(name, SPEC)
        drafter = ShmChannel.attach(name, 1)
        publish(channel.verifier_end)
        assert drafter.poll_outcome() is not None
        drafter.close()
        channel.verifier_end.close()
        assert not (SHM_DIR / f"{PREFIX}{name}").exists()
    del channel, drafter
    assert len(os.listdir("/proc/self/fd")) == open_files
