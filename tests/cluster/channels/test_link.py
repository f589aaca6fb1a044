"""Messages over a pair of bounded rings: whole, in order, whatever their size, and never in anybody's way."""

import os
import random
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from wingbeat.cluster.channels.link import NUM_WORDS, Link, Ring

RING_BYTES = 4096


class Sides(NamedTuple):
    parent: Link
    child: Link


@pytest.fixture
def sides() -> Iterator[Sides]:
    parent = Link.create(RING_BYTES)
    child = Link(*map(os.dup, parent.child_fds), is_parent=False)
    yield Sides(parent, child)
    parent.close()
    child.close()


def test_messages_of_any_size_arrive_whole_and_in_order_both_ways(sides: Sides):
    rng = random.Random(0)
    sizes = [rng.choice([0, 1, 100, RING_BYTES - 9, RING_BYTES, 5 * RING_BYTES]) for _ in range(60)]
    for sender, receiver in (sides, reversed(sides)):
        got = []
        for index, size in enumerate(sizes):
            sender.send((index, bytes([index]) * size))
            got += receiver.receive()
        while sender.clogged:
            sender.flush()
            got += receiver.receive()
        assert got == [(index, bytes([index]) * size) for index, size in enumerate(sizes)]


def test_a_full_ring_holds_its_writer_up_for_nothing(sides: Sides):
    ends = [sides.parent.send(bytes(900)) for _ in range(10)]
    assert sides.parent.clogged
    assert not sides.parent.was_read(ends[0])
    assert list(sides.child.receive()) == [bytes(900)] * 4
    # The fifth was read in part.
    assert [sides.parent.was_read(end) for end in ends] == [True] * 4 + [False] * 6
    while sides.parent.clogged:
        sides.parent.flush()
        assert set(sides.child.receive()) <= {bytes(900)}
    assert sides.parent.was_read(ends[-1])


def test_a_reader_that_is_interrupted_finds_the_rest_later(sides: Sides):
    for number in range(3):
        sides.parent.send(number)
    assert next(sides.child.receive()) == 0
    assert list(sides.child.receive()) == [1, 2]


def test_what_cannot_be_sent_leaves_the_link_as_it_was(sides: Sides):
    with pytest.raises((AttributeError, TypeError)):
        sides.parent.send(lambda: None)
    sides.parent.send("next")
    assert list(sides.child.receive()) == ["next"]


def test_a_ring_of_an_odd_size_wraps_at_any_place():
    ring = Ring(memoryview(bytearray(8 * NUM_WORDS)).cast("q"), memoryview(bytearray(13)))
    data, written, got = memoryview(random.Random(0).randbytes(500)), 0, b""
    for step in range(1, 400):
        written += ring.write(data[written : written + step % 7])
        if step % 3:
            got += ring.read()
    assert got + ring.read() == bytes(data[:written])
    assert written > 400


@pytest.mark.timeout(20)
def test_a_message_ends_a_wait_and_so_does_a_wake(sides: Sides):
    """Each turn would last the test's whole time if a ring got lost."""

    def answer() -> None:
        for _ in range(200):
            while not (got := list(sides.child.receive())):
                sides.child.wait(None)
            sides.child.send(got[0] + 1)

    thread = threading.Thread(target=answer)
    thread.start()
    for turn in range(200):
        sides.parent.send(turn)
        while not (got := list(sides.parent.receive())):
            sides.parent.wait(None)
        assert got == [turn + 1]
    thread.join()
    timer = threading.Timer(0.01, sides.parent.wake)
    timer.start()
    sides.parent.wait(None)
    timer.join()


def test_a_wait_without_a_message_ends_in_time(sides: Sides):
    before = time.monotonic()
    sides.parent.wait(0.01)
    assert time.monotonic() >= before + 0.01
