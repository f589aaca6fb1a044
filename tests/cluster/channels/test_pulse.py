"""A process's pulse in shared memory: one process writes its progress, the other reads it."""

import os
import time
from collections.abc import Iterator

import pytest

from wingbeat.cluster.channels import pulse
from wingbeat.cluster.channels.link import Link
from wingbeat.cluster.channels.pulse import NAMES_BYTES, Beat, Pulse, Work, size_class


@pytest.fixture
def sides() -> Iterator[tuple[Pulse, Pulse]]:
    """Pulses of the working process and of the watching process."""
    parent = Link.create(4096)
    child = Link(*map(os.dup, parent.child_fds), is_parent=False)
    yield child.pulse, parent.pulse
    parent.close()
    child.close()


def test_each_piece_of_work_is_another_beat(sides: tuple[Pulse, Pulse]):
    works, watches = sides
    assert watches.read() == Beat(0, Work.NONE, 0)
    works.begin(Work.MESSAGE, ("a:1",))
    assert (watches.read(), watches.names()) == (Beat(1, Work.MESSAGE, 0), ["a:1"])
    works.begin(Work.ROUND)
    assert watches.names() == ["a:1"], "who was in the round before, until the next is known"
    works.sized(17, ["a:1", "b:2"])
    assert (watches.read(), watches.names()) == (Beat(3, Work.ROUND, 17), ["a:1", "b:2"])
    works.end()
    assert (watches.read(), watches.names()) == (Beat(4, Work.NONE, 0), [])


def test_the_slowest_round_of_a_size_counts_until_many_others_have_followed(
    sides: tuple[Pulse, Pulse], monkeypatch: pytest.MonkeyPatch
):
    works, watches = sides
    now = [0]
    monkeypatch.setattr(pulse.time, "monotonic_ns", lambda: now[0])

    def run(size: int, seconds: float) -> None:
        works.sized(size, [])
        now[0] += int(1e9 * seconds)
        works.end()

    run(16, 10.0)
    run(31, 0.1)  # of the same class
    run(4, 0.5)
    slowest_s = watches.slowest_s()
    assert slowest_s[size_class(4)] == 0.5
    assert 9.0 < slowest_s[size_class(16)] < 10.0
    for _ in range(400):
        run(16, 0.1)
    assert watches.slowest_s()[size_class(16)] == pytest.approx(0.1)


def test_time_between_rounds_is_nobodys(sides: tuple[Pulse, Pulse]):
    works, watches = sides
    works.sized(8, [])
    works.end()
    before = watches.slowest_s()
    time.sleep(0.01)
    works.begin(Work.CALL)
    works.end()
    assert watches.slowest_s() == before


def test_more_names_than_find_room_are_left_out_whole(sides: tuple[Pulse, Pulse]):
    works, watches = sides
    names = [f"{index:063}" for index in range(NAMES_BYTES // 64 + 10)]
    works.begin(Work.MESSAGE, names)
    assert watches.names() == names[: NAMES_BYTES // 64]
    works.begin(Work.MESSAGE, ())
    assert watches.names() == []
