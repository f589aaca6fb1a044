"""The verifier's stream waits for the drafter's device by a word of host memory, and its host lets the stream go."""

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.cluster.channels.cuda.cuda_pair import ROUNDS_BEHIND, BehindEnd, Pair
from tests.cluster.channels.cuda.fake_cuda import FakeCuda, FakeMachine
from tests.cluster.peers import DEVICE, LONG_S, SHORT_S, SPEC, Nursery, eventually, publish
from tests.runtime.models import TREE, Run, eagle_drafter, engine_config, greedy_params, reference
from wingbeat.cluster.channels.channel import VerifierSide
from wingbeat.cluster.channels.cuda.cuda_ipc import CudaIpcChannel
from wingbeat.cluster.channels.header import ROUND_BITS, Word
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine

TEXT = 40


class Mortal:
    """A drafter's process that ends when the test has it end."""

    lives = True

    def works(self) -> bool:
        return self.lives


def follow(pair: Pair, limit_s: float = LONG_S) -> int:
    """The number of a new round whose answer the verifier's stream waits for."""
    round_number = publish(pair.verifier)
    pair.answer()
    before = len(pair.verifier_cuda.log)
    assert pair.verifier.wait_reply(round_number, limit_s, by_device=True) is not None
    asked = {event for _, event in pair.verifier_cuda.log[before:]}
    assert not asked & {"2", "3"}, "the host asked for an event of the drafter"
    return round_number


def word_of(pair: Pair) -> tuple[int, int]:
    """Incarnation and round of the word."""
    return divmod(pair.verifier._words[Word.COMPLETED], 1 << ROUND_BITS)


def test_the_stream_waits_until_the_drafters_device_is_done_and_the_host_does_not(pair: Pair):
    pair.drafter_cuda.stuck = True
    for _ in range(2):
        round_number = follow(pair)
    assert not pair.verifier_cuda.run(), "the stream went on"
    assert word_of(pair) == (1, 0)
    pair.drafter_cuda.stuck = False
    pair.drafter_cuda.run()
    assert word_of(pair) == (1, round_number)
    assert pair.verifier_cuda.run()


def test_the_word_grows_with_every_reply_and_every_drafter(pair: Pair):
    seen = [word_of(pair)]
    for incarnation in (2, 3):
        for _ in range(3):
            follow(pair)
            seen.append(word_of(pair))
        pair.drafter.close()
        pair.attach(incarnation)
        seen.append(word_of(pair))
    assert seen == sorted(set(seen))


def test_a_host_waits_that_was_not_told_to_leave_it_to_the_device(pair: Pair):
    round_number = publish(pair.verifier)
    pair.answer()
    pair.machine.busy = True
    publish(pair.verifier)
    pair.answer()
    assert pair.verifier.wait_reply(round_number + 1, SHORT_S) is None
    assert pair.verifier_cuda._stream == pair.verifier_cuda._stream.__class__()


@pytest.mark.parametrize("how", ["dies", "is replaced", "is too slow"])
def test_the_host_lets_the_stream_go_if_the_drafter(pair: Pair, how: str, monkeypatch: pytest.MonkeyPatch):
    pair.drafter_cuda.stuck = True
    if how == "dies":
        pair.kill_drafter(monkeypatch)
    follow(pair, SHORT_S if how == "is too slow" else LONG_S)
    first = pair.drafter
    if how == "is replaced":
        assert not pair.verifier_cuda.run()
        pair.attach(2)  # whose device never writes either
    assert eventually(pair.verifier_cuda.run, LONG_S / 2)
    if first is not pair.drafter:
        pair.drafter_cuda.stuck = False
        first.close()


def test_a_device_that_is_too_slow_counts_from_the_end_of_the_verifiers_own_work(pair: Pair):
    pair.drafter_cuda.stuck = True
    state = pair.verifier_cuda.machine.events[b"1".ljust(64, b"\0")]
    follow(pair, 0.0)
    state.num_finished = -1  # the outcome of round 1 is not written yet
    time.sleep(0.1)
    assert not pair.verifier_cuda.run()
    state.num_finished = state.num_records
    assert eventually(pair.verifier_cuda.run)


def test_late_writes_of_a_released_drafter_hold_no_stream(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Two rounds are enqueued; the device of the dead drafter writes the first one's number after the release."""
    pair.drafter_cuda.stuck = True
    peer = Mortal()
    monkeypatch.setattr(pair.verifier, "_peer_process", lambda: peer)
    follow(pair)
    last = follow(pair)
    waits, held = pair.verifier._reply_ready._waits, [True]
    pair.verifier_cuda._stream.insert(1, lambda: not held[0])  # between the two waits
    peer.lives = False
    assert eventually(lambda: word_of(pair)[1] > last)
    pair.verifier._words[Word.COMPLETED] = 1 << ROUND_BITS | last - 1
    held[0] = False
    assert eventually(pair.verifier_cuda.run)
    assert eventually(lambda: not waits._waits)


def test_after_a_release_hosts_wait_until_the_drafters_device_has_written_again(pair: Pair):
    pair.drafter_cuda.stuck = True
    follow(pair, 0.0)
    assert eventually(pair.verifier_cuda.run)
    events = pair.verifier._reply_ready
    number, peer = 1 << ROUND_BITS | 2, pair.verifier._peer_process()
    assert not events.follow(number, LONG_S, peer)
    pair.drafter_cuda.stuck = False
    pair.drafter_cuda.run()
    assert events.follow(1 << ROUND_BITS | 1, LONG_S, peer)
    assert not events.follow(2 << ROUND_BITS | 2, LONG_S, peer), "another drafter wrote the word"


def test_the_thread_ends_when_no_stream_waits(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("wingbeat.cluster.channels.cuda.reply_word.QUIET_CHECKS", 3)

    def checked() -> bool:
        return any(thread.name == "wingbeat-reply-waits" for thread in threading.enumerate())

    assert eventually(lambda: not checked())
    for _ in range(2):
        follow(pair)
        assert checked()
        assert eventually(lambda: not checked())


@pytest.mark.parametrize(
    ("side", "fail"),
    [("verifier", "map_host"), ("verifier", "write_value"), ("verifier", "wait_value"), ("drafter", "map_host"),
     ("drafter", "write_value")],
)  # fmt: skip
def test_without_the_word_hosts_ask_as_before(name: str, side: str, fail: str):
    machine = FakeMachine()
    fails = {"verifier": "", "drafter": ""} | {side: fail}
    cudas = [FakeCuda(machine, fail=fails[one]) for one in ("verifier", "drafter")]
    channel = CudaIpcChannel.create(name, SPEC, DEVICE, cudas[0])
    drafter = CudaIpcChannel.attach(name, 1, DEVICE, cudas[1])
    assert channel.try_drafter()
    for _ in range(3):
        round_number = publish(channel.verifier_end)
        assert drafter.poll_outcome() is not None
        drafter.publish_reply()
        cudas[0].log.clear()
        assert channel.verifier_end.wait_reply(round_number, LONG_S, by_device=True) is not None
        assert [kind for kind, _ in cudas[0].log] == ["query"]
    drafter.close()
    channel.verifier_end.close()
    assert machine.is_clean()


def test_a_stream_that_cannot_be_marked_is_let_go(pair: Pair):
    pair.drafter_cuda.stuck = True
    round_number = publish(pair.verifier)
    pair.answer()
    pair.verifier_cuda.fail = "mark"
    assert pair.verifier.wait_reply(round_number, LONG_S, by_device=True) is not None
    assert pair.verifier_cuda.run()


def test_two_processes_and_a_killed_one(nursery: Nursery, name: str):
    """Hosts return before the drafter's device is done; the stream reads each reply then, and outlives a kill."""
    cuda, read, early = FakeCuda(), [], 0
    channel = CudaIpcChannel.create(name, SPEC, DEVICE, cuda)
    verifier, waits = channel.verifier_end, channel.verifier_end._reply_ready._waits
    drafter = nursery.start(name, 1, "answer", "fake-cuda-behind")
    assert eventually(lambda: verifier.incarnation == 1)
    for number in range(1, ROUNDS_BEHIND + 1):
        reply = verifier.wait_reply(publish(verifier), LONG_S, by_device=True)
        early += verifier._words[Word.COMPLETED] < 1 << ROUND_BITS | number
        cuda.enqueue(lambda reply=reply: read.append(reply.epochs.unique().tolist()) is None)
        assert eventually(cuda.run)
    assert read == [[100 * number + 1] for number in range(1, ROUNDS_BEHIND + 1)]
    assert early > ROUNDS_BEHIND // 2, "the host waited"
    assert verifier.wait_reply(publish(verifier), LONG_S, by_device=True) is not None
    time.sleep(SHORT_S)
    assert not cuda.run()
    assert len(waits._waits) == 1
    os.kill(drafter, signal.SIGKILL)
    assert eventually(cuda.run, LONG_S / 2)
    assert verifier.wait_reply(publish(verifier), LONG_S, by_device=True) is None
    verifier.close()


class PumpingEnd:
    """A verifier's end whose drafter answers in the same thread, as soon as a round is published."""

    def __init__(self, end: VerifierSide, pump: Callable[[], object]) -> None:
        self._end, self._pump = end, pump

    def __getattr__(self, name: str) -> object:
        return getattr(self._end, name)

    def publish_outcome(self) -> int:
        number = self._end.publish_outcome()
        self._pump()
        return number


def texts(name: str, fail: str = "", behind: bool = False) -> tuple[list[list[int]], int, int]:
    """Texts of an engine on the CPU, whose own reads wait for no stream; accepted drafts; times an event was asked for.

    Args:
        behind: whether each reply is complete a round late.
    """
    ref, machine = reference("llama"), FakeMachine()
    drafter, cuda = eagle_drafter(ref.loaded, TREE), FakeCuda(machine)
    engine = Engine(ref.loaded, engine_config(TREE), drafter.needs)
    channel = CudaIpcChannel.create(name, engine.channel_spec, DEVICE, FakeCuda(machine, fail=fail))
    end, worker = CudaIpcChannel.attach(name, 1, DEVICE, cuda), DraftWorker(drafter)
    rounds: list[int] = []

    def a_round_later(number: int) -> Callable[[], bool]:
        rounds.append(number)
        return lambda: rounds[-1] > number

    worker.attach(name, BehindEnd(end, cuda, a_round_later) if behind else end)
    engine.attach_drafter(PumpingEnd(channel.verifier_end, worker.run_once))
    run = Run(engine, ref.prompts, greedy_params(TEXT))
    while engine.has_unfinished_requests():
        run.step()
    engine.model.remove_taps()
    kinds = [kind for kind, _ in channel._mapping.runtime.log]
    cuda._stream.clear()
    worker.detach(name)
    channel.verifier_end.close()
    return run.tokens, engine.speculation.num_accepted_tokens, kinds.count("query")


def test_texts_are_the_same_with_the_word_without_it_and_with_trees_that_come_too_late(name: str):
    by_stream, by_host, late = texts(name), texts(name, fail="map_host"), texts(name, behind=True)
    assert by_stream[:2] == by_host[:2]
    assert by_stream[2] < by_host[2], "the host asked for every reply"
    assert by_host[0] == late[0] == [tokens[:TEXT] for tokens in reference("llama").continuations]
    assert by_host[1] > 0
    assert late[1] == 0, "an outdated tree was verified"
