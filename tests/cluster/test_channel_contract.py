"""What every kind of channel keeps, and what the kind between processes keeps when a process dies, stops or returns.

Run as a script, this file is a nursery of peers: each line `NAME INCARNATION MODE` on its input forks a process, whose
id it prints. Forking spares each peer the seconds that importing torch takes.
"""

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wingbeat.cluster import shm
from wingbeat.cluster.channel import ChannelError, DrafterSide, InProcessChannel, VerifierSide, Word
from wingbeat.cluster.doorbell import PeerProcess, process_start
from wingbeat.cluster.shm import SHM_DIR, ShmChannel
from wingbeat.runtime.batch import ChannelSpec, Outcome, TreeReply, reply_layout

SPEC = ChannelSpec(
    num_slots=3,
    num_nodes=5,
    max_path=4,
    max_prefill_tokens=7,
    taps_size=6,
    max_model_len=11,
    max_blocks_per_seq=2,
    block_size=4,
    num_blocks=9,
    taps_dtype=torch.bfloat16,
)
LONG_S = 30.0
"""Never waited out where the property holds."""
SHORT_S = 0.05


def fill_reply(outcome: Outcome, token_ids: Tensor, reply: TreeReply, incarnation: int) -> None:
    """An answer that names the bytes of every field it was given."""
    digests = [zlib.crc32(field.contiguous().view(torch.uint8).numpy().tobytes()) for field in (*outcome, token_ids)]
    reply.token_ids.flatten()[:] = torch.tensor(digests[:15])
    reply.parents.flatten()[: len(digests) - 15] = torch.tensor(digests[15:])
    for index, field in enumerate((reply.epochs, reply.committed_lens, reply.depths, reply.scores, reply.num_valid)):
        field.fill_(100 * int(outcome.header[0]) + 10 * index + incarnation)


def run_drafter(name: str, incarnation: int, mode: str) -> None:
    """A drafter until its channel closes: it answers, holds every round, or stops with a reply half published."""
    end = ShmChannel.attach(name, incarnation)
    while not end.closed:
        outcome = end.wait_outcome(SHORT_S)
        if outcome is None or mode == "hold":
            continue
        fill_reply(outcome, end.token_ids, end.reply, incarnation)
        if mode == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        end.publish_reply()
    end.close()


def run_verifier(name: str, mode: str) -> None:
    """A verifier that never closes its channel: it ends at once, or lives as long as the nursery."""
    channel, parent = ShmChannel.create(name, SPEC), os.getppid()
    while mode == "verifier" and os.getppid() == parent:
        channel.verifier_end.acquire_outcome(0.0)
        time.sleep(0.005)


def run_peer(name: str, incarnation: int, mode: str) -> None:
    """The body of a forked peer."""
    if mode in {"verifier", "leave"}:
        run_verifier(name, mode)
    else:
        run_drafter(name, incarnation, mode)


def run_nursery() -> None:
    """Children are not collected, as under a busy parent: a killed one stays a zombie."""
    torch.set_num_threads(1)
    print("ready", flush=True)
    while line := sys.stdin.readline():
        name, incarnation, mode = line.split()
        pid = os.fork()
        if not pid:
            run_peer(name, int(incarnation), mode)
            if mode != "leave":
                os._exit(0)  # spares the seconds that an interpreter with torch takes to end
            return
        print(pid, flush=True)


class Nursery:
    """Starts peers and kills those left over."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n"
        self.pids: list[int] = []

    def start(self, name: str, incarnation: int, mode: str) -> int:
        self.process.stdin.write(f"{name} {incarnation} {mode}\n")
        self.process.stdin.flush()
        self.pids.append(int(self.process.stdout.readline()))
        return self.pids[-1]

    def kill_peers(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)  # uncollected, so the id still is the peer's
        self.pids.clear()

    def close(self) -> None:
        self.kill_peers()
        self.process.communicate()


@pytest.fixture(scope="module")
def nursery_process() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def nursery(nursery_process: Nursery) -> Iterator[Nursery]:
    yield nursery_process
    nursery_process.kill_peers()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A channel name of this test's own; whatever the test leaves behind goes, and fails it."""
    name = f"test-{os.getpid()}-{zlib.crc32(request.node.name.encode())}"
    yield name
    left = list(SHM_DIR.glob(f"{shm.PREFIX}{name}*"))
    for path in left:
        path.unlink()
    assert not left


class InProcessRig:
    """The drafter runs whenever the verifier waits."""

    def __init__(self) -> None:
        self.channel = InProcessChannel(SPEC)
        self.verifier = self.channel.verifier_end
        self.drafter = self.channel.drafter_end
        self.drafter.close()

    def start(self, incarnation: int, mode: str) -> None:
        self.drafter = self.channel.attach(incarnation)
        self.channel.pump = self._answer if mode == "answer" else lambda: None

    def _answer(self) -> None:
        outcome = self.drafter.poll_outcome()
        if outcome is not None:
            fill_reply(outcome, self.drafter.token_ids, self.drafter.reply, self.drafter.incarnation)
            self.drafter.publish_reply()

    def drafter_saw_close(self) -> bool:
        return self.drafter.closed


class ShmRig:
    """The drafter is another process."""

    def __init__(self, nursery: Nursery, name: str) -> None:
        self.nursery, self.name = nursery, name
        self.channel = ShmChannel.create(name, SPEC)
        self.verifier = self.channel.verifier_end
        self.pid = 0

    def start(self, incarnation: int, mode: str) -> None:
        self.pid = self.nursery.start(self.name, incarnation, mode)
        assert eventually(lambda: self.verifier.incarnation == incarnation)

    def drafter_saw_close(self) -> bool:
        return eventually(lambda: not is_alive(self.pid))


Rig = InProcessRig | ShmRig


@pytest.fixture(params=["in-process", "shm"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    if request.param == "in-process":
        rig = InProcessRig()
    else:
        rig = ShmRig(request.getfixturevalue("nursery"), request.getfixturevalue("name"))
    yield rig
    rig.verifier.close()


@pytest.fixture
def shm_rig(nursery: Nursery, name: str) -> Iterator[ShmRig]:
    rig = ShmRig(nursery, name)
    yield rig
    rig.verifier.close()


def eventually(condition: Callable[[], bool], timeout_s: float = LONG_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def is_alive(pid: int) -> bool:
    return PeerProcess(pid, process_start(pid)).alive()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def randomise(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.copy_(torch.randint(0, 1000, tensor.shape, generator=generator))


def publish(verifier: VerifierSide) -> int:
    assert verifier.acquire_outcome(LONG_S) is not None
    return verifier.publish_outcome()


def round_trip(verifier: VerifierSide) -> TreeReply | None:
    return verifier.wait_reply(publish(verifier), LONG_S)


def test_every_field_arrives_on_both_sides_round_after_round(rig: Rig) -> None:
    rig.start(2, "answer")
    generator = torch.Generator().manual_seed(5)
    for round_number in range(1, 7):
        outcome = rig.verifier.acquire_outcome(LONG_S)
        for tensor in (*outcome, rig.verifier.token_ids):
            randomise(tensor, generator)
        assert rig.verifier.publish_outcome() == round_number
        reply = rig.verifier.wait_reply(round_number, LONG_S)
        expected = TreeReply(*(torch.zeros(shape, dtype=dtype) for shape, dtype in reply_layout(SPEC).values()))
        fill_reply(outcome, rig.verifier.token_ids, expected, incarnation=2)
        expected.header[:2] = torch.tensor([round_number, 2])
        for field, got, want in zip(TreeReply._fields, reply, expected, strict=True):
            assert torch.equal(got, want), field


def test_addresses_alternate_between_two_and_never_move(rig: Rig) -> None:
    rig.start(2, "answer")
    seen = []
    for _ in range(5):
        outcome = rig.verifier.acquire_outcome(LONG_S)
        reply = rig.verifier.wait_reply(rig.verifier.publish_outcome(), LONG_S)
        seen.append([tensor.data_ptr() for tensor in (*outcome, *reply)])
        assert all(address % 64 == 0 for address in seen[-1])
    assert seen[0] == seen[2] == seen[4] != seen[1] == seen[3]


def test_two_rounds_may_be_under_way_and_a_third_has_to_wait(rig: Rig) -> None:
    rig.start(2, "hold")
    first, second = publish(rig.verifier), publish(rig.verifier)
    assert rig.verifier.acquire_outcome(SHORT_S) is None
    assert rig.verifier.wait_reply(first, SHORT_S) is None
    assert rig.verifier.wait_reply(second, 0.0) is None
    with pytest.raises(RuntimeError, match="without an acquired"):
        rig.verifier.publish_outcome()
    assert rig.verifier.peer_alive()
    assert rig.verifier.peer_silent_s < LONG_S


def test_rounds_may_overlap(rig: Rig) -> None:
    rig.start(2, "answer")
    older = publish(rig.verifier)
    for _ in range(5):
        newer = publish(rig.verifier)
        assert rig.verifier.wait_reply(older, LONG_S).header[0] == older
        older = newer
    assert rig.verifier.wait_reply(older, LONG_S).header[0] == older


def test_without_a_drafter_nothing_blocks(rig: Rig) -> None:
    assert rig.verifier.incarnation == 0
    assert not rig.verifier.peer_alive()
    for _ in range(4):
        assert round_trip(rig.verifier) is None


def test_a_new_incarnation_skips_old_rounds_and_closes_its_predecessor(rig: Rig) -> None:
    rig.start(3, "hold")
    unread = [publish(rig.verifier), publish(rig.verifier)]
    saw_close = rig.drafter_saw_close if isinstance(rig, ShmRig) else lambda drafter=rig.drafter: drafter.closed
    pid = getattr(rig, "pid", 0)
    rig.start(4, "answer")
    assert rig.verifier.incarnation == 4
    for round_number in unread:
        assert rig.verifier.wait_reply(round_number, LONG_S) is None
    assert round_trip(rig.verifier).header.tolist()[:2] == [3, 4]
    assert eventually(lambda: not is_alive(pid)) if pid else saw_close()


def test_the_verifier_closing_is_seen_by_the_drafter_and_ends_both_sides(rig: Rig) -> None:
    rig.start(2, "answer")
    assert round_trip(rig.verifier) is not None
    rig.verifier.close()
    assert rig.drafter_saw_close()
    assert rig.verifier.acquire_outcome(LONG_S) is None
    assert rig.verifier.wait_reply(1, LONG_S) is None
    assert not rig.verifier.peer_alive()
    rig.verifier.close()


def test_an_in_process_drafter_may_run_in_another_thread_at_its_own_pace() -> None:
    channel = InProcessChannel(SPEC)
    assert channel.drafter_end.wait_outcome(SHORT_S) is None
    round_number = publish(channel.verifier_end)
    assert channel.verifier_end.wait_reply(round_number, SHORT_S) is None
    assert channel.drafter_end.wait_outcome(LONG_S).header[0] == round_number
    channel.drafter_end.publish_reply()
    assert channel.verifier_end.wait_reply(round_number, LONG_S).header[0] == round_number


@pytest.mark.timeout(60)
def test_rings_wake_a_sleeping_peer_on_either_side() -> None:
    """Sleeps may last 0.9 s here: were a side not rung, a hundred rounds would outlast the test."""
    channel = InProcessChannel(SPEC)
    verifier, drafter = channel.verifier_end, channel.drafter_end
    verifier._doorbell.max_sleep_s = drafter._doorbell.max_sleep_s = 0.9

    def answer_rounds() -> None:
        while not drafter.closed:
            if drafter.wait_outcome(LONG_S) is not None:
                time.sleep(0.002)
                drafter.publish_reply()

    thread = threading.Thread(target=answer_rounds, daemon=True)
    thread.start()
    for _ in range(100):
        time.sleep(0.002)
        assert round_trip(verifier) is not None
    verifier.close()
    thread.join()


def test_a_drafter_answers_only_what_it_polled_and_only_once() -> None:
    channel = InProcessChannel(SPEC)
    drafter = channel.drafter_end
    publish(channel.verifier_end)
    with pytest.raises(RuntimeError, match="no outcome has been polled"):
        drafter.publish_reply()
    assert drafter.poll_outcome().header[0] == drafter.poll_outcome().header[0] == 1
    drafter.publish_reply()
    assert drafter.poll_outcome() is None
    with pytest.raises(RuntimeError, match="no outcome has been polled"):
        _ = drafter.reply


def test_a_drafter_that_leaves_is_no_longer_attached() -> None:
    channel = InProcessChannel(SPEC)
    channel.drafter_end.close()
    assert channel.drafter_end.closed
    assert channel.verifier_end.incarnation == 0
    assert not channel.verifier_end.peer_alive()


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
    assert verifier.wait_reply(3, LONG_S).header[:2].tolist() == [3, 2]

    # As if the old one had been stopped between its last check and its writes.
    verifier._words[Word.REPLIED] = old._own_reply_word()
    assert verifier.wait_reply(3, SHORT_S) is None
    assert new.poll_outcome() is None
    reply = verifier.wait_reply(3, LONG_S)
    reply.header[:2] = torch.tensor([1, 1])
    assert verifier.wait_reply(3, LONG_S) is None
    assert verifier.acquire_outcome(LONG_S) is not None
    verifier.close()


def test_a_wait_ends_when_another_drafter_attaches() -> None:
    channel = InProcessChannel(SPEC)
    round_number = publish(channel.verifier_end)
    attaching = threading.Timer(SHORT_S, channel.attach, args=(2,))
    attaching.start()
    assert channel.verifier_end.wait_reply(round_number, 600.0) is None
    attaching.join()


def test_a_drafter_killed_in_a_round_is_noticed_and_replaced(shm_rig: ShmRig) -> None:
    shm_rig.start(2, "hold")
    round_number = publish(shm_rig.verifier)
    assert shm_rig.verifier.peer_alive()
    os.kill(shm_rig.pid, signal.SIGKILL)
    assert shm_rig.verifier.wait_reply(round_number, 60.0) is None
    assert state_of(shm_rig.pid) == "Z"
    assert not shm_rig.verifier.peer_alive()
    for _ in range(3):
        assert round_trip(shm_rig.verifier) is None
    shm_rig.start(3, "answer")
    assert round_trip(shm_rig.verifier).header[1] == 3


def test_a_stopped_drafter_times_out_and_cannot_disturb_its_successor(shm_rig: ShmRig) -> None:
    shm_rig.start(1, "stop")
    old = shm_rig.pid
    round_number = publish(shm_rig.verifier)
    assert eventually(lambda: state_of(old) == "T")
    assert shm_rig.verifier.wait_reply(round_number, SHORT_S) is None
    assert shm_rig.verifier.peer_alive()
    shm_rig.start(2, "answer")
    assert round_trip(shm_rig.verifier).header[1] == 2
    os.kill(old, signal.SIGCONT)
    assert eventually(lambda: state_of(old) == "Z")
    for _ in range(4):
        assert round_trip(shm_rig.verifier).header[1] == 2


def test_a_dead_verifier_closes_its_drafter_and_leaves_no_segment(nursery: Nursery, name: str) -> None:
    pid = nursery.start(name, 0, "verifier")
    path = SHM_DIR / f"{shm.PREFIX}{name}"
    assert eventually(path.exists)
    drafter = ShmChannel.attach(name, 1)
    assert not drafter.closed
    with pytest.raises(ChannelError, match="its verifier is alive"):
        ShmChannel.create(name, SPEC)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: drafter.closed)
    assert drafter.wait_outcome(LONG_S) is None
    with pytest.raises(ChannelError, match="has closed it or is gone"):
        ShmChannel.attach(name, 2)
    channel = ShmChannel.create(name, SPEC)
    assert ShmChannel.attach(name, 1).poll_outcome() is None
    channel.verifier_end.close()


def test_a_verifier_that_ends_without_closing_unlinks_its_segment(nursery: Nursery, name: str) -> None:
    pid = nursery.start(name, 0, "leave")
    assert eventually(lambda: state_of(pid) == "Z")
    assert not (SHM_DIR / f"{shm.PREFIX}{name}").exists()


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
    assert (SHM_DIR / f"{shm.PREFIX}{name}").exists()
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
        assert not (SHM_DIR / f"{shm.PREFIX}{name}").exists()
    del channel, drafter
    assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize("taps_size", [0, 12288], ids=["no-taps", "large"])
def test_the_spec_travels_with_the_segment(name: str, taps_size: int) -> None:
    spec = dataclasses.replace(SPEC, taps_size=taps_size, num_slots=17, max_prefill_tokens=1024)
    channel = ShmChannel.create(name, spec)
    drafter = ShmChannel.attach(name, 1)
    assert drafter.spec == spec
    outcome = channel.verifier_end.acquire_outcome(0.0)
    outcome.chunk_taps.fill_(3)
    channel.verifier_end.token_ids[-1, -1] = 9
    channel.verifier_end.publish_outcome()
    assert drafter.poll_outcome().chunk_taps.shape == (1024, taps_size)
    assert bool((drafter.poll_outcome().chunk_taps == 3).all())
    assert drafter.token_ids[-1, -1] == 9
    channel.verifier_end.close()


def test_a_segment_that_dev_shm_cannot_hold_is_refused_before_it_is_touched(name: str) -> None:
    spec = dataclasses.replace(SPEC, max_model_len=2**45)
    with pytest.raises(ChannelError, match="MiB are free"):
        ShmChannel.create(name, spec)


@pytest.mark.parametrize("bad", ["", "a/b", "a\0b", "x" * 300], ids=["empty", "slash", "nul", "long"])
def test_a_name_that_is_no_file_name_is_refused(bad: str) -> None:
    with pytest.raises(ChannelError, match="must be a file name"):
        ShmChannel.create(bad, SPEC)


def test_attaching_to_nothing_says_so(name: str) -> None:
    with pytest.raises(ChannelError, match=f"no channel '{name}'"):
        ShmChannel.attach(name, 1)


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (Word.MAGIC, 7, "foreign header"),
        (Word.VERSION, 999, "layout version 999"),
        (Word.SPEC_BYTES, 3, "damaged spec"),
        (Word.SPEC_BYTES, -1, "damaged spec"),
    ],
)
def test_a_header_that_is_not_ours_is_refused(name: str, word: int, value: int, message: str) -> None:
    channel = ShmChannel.create(name, SPEC)
    channel.verifier_end._words[word] = value
    with pytest.raises(ChannelError, match=message):
        ShmChannel.attach(name, 1)
    channel.verifier_end.close()


def test_a_file_that_is_no_segment_is_refused_and_left_alone(name: str) -> None:
    path = SHM_DIR / f"{shm.PREFIX}{name}"
    for content, message in ((b"short", "is not a channel"), (b"\xff" * 8192, "foreign header")):
        path.write_bytes(content)
        with pytest.raises(ChannelError, match=message):
            ShmChannel.attach(name, 1)
        shm.remove_stale_segments()
        assert path.read_bytes() == content
    path.unlink()


def test_a_truncated_segment_is_refused(name: str) -> None:
    channel = ShmChannel.create(name, SPEC)
    os.truncate(SHM_DIR / f"{shm.PREFIX}{name}", shm.HEADER_BYTES)
    with pytest.raises(ChannelError, match="asks for another size"):
        ShmChannel.attach(name, 1)
    os.truncate(SHM_DIR / f"{shm.PREFIX}{name}", 1 << 20)
    channel.verifier_end.close()


def test_drafts_of_segments_are_removed_with_their_dead_maker(name: str) -> None:
    dead = SHM_DIR / f"{shm.PREFIX}{name}.{os.getpid()}.1{shm.UNFINISHED}"
    live = SHM_DIR / f"{shm.PREFIX}{name}.{os.getpid()}.{process_start(os.getpid())}{shm.UNFINISHED}"
    dead.touch()
    live.touch()
    shm.remove_stale_segments()
    assert not dead.exists()
    assert live.exists()
    live.unlink()


def test_ends_fulfil_the_runtimes_contract() -> None:
    from wingbeat.runtime.link import DrafterEnd, VerifierEnd

    for side, contract in ((VerifierSide, VerifierEnd), (DrafterSide, DrafterEnd)):
        methods = {member for member in vars(contract) if not member.startswith("_")}
        assert methods <= set(dir(side))


if __name__ == "__main__":
    run_nursery()
