"""When an engine counts as stuck, by beats and times that the test makes up."""

import pytest

from wingbeat.cluster.channels.pulse import NUM_SIZES, Beat, Work, size_class
from wingbeat.deployments.replica.engine_watch import CALLS, FIRST, LOOK_S, ROUNDS, UNKNOWN_SIZE, EngineWatch, Look

STUCK_S = 30.0
NOTHING = (0.0,) * NUM_SIZES


def measured(**seconds: float) -> tuple[float, ...]:
    """By the size of rounds, as `of_16=0.5`."""
    found = list(NOTHING)
    for name, slowest_s in seconds.items():
        found[size_class(int(name.removeprefix("of_")))] = slowest_s
    return tuple(found)


@pytest.mark.parametrize(
    ("beat", "slowest_s", "patience_s"),
    [
        (Beat(1, Work.ROUND, 16), measured(of_16=0.02), STUCK_S),
        (Beat(1, Work.ROUND, 16), measured(of_16=20.0), ROUNDS * 20.0),
        (Beat(1, Work.ROUND, 512), NOTHING, FIRST * STUCK_S),
        (Beat(1, Work.ROUND, 512), measured(of_1=0.01), UNKNOWN_SIZE * STUCK_S),
        (Beat(1, Work.ROUND, 512), measured(of_1=1.5), ROUNDS * 512 * 1.5),
        (Beat(1, Work.ROUND, 512), measured(of_1=1.5, of_256=40.0), ROUNDS * 2 * 40.0),
        (Beat(1, Work.ROUND, 2), measured(of_512=60.0), ROUNDS * 60.0),
        (Beat(1, Work.ROUND, 0), measured(of_512=60.0), STUCK_S),
        (Beat(1, Work.MESSAGE, 0), measured(of_512=60.0), STUCK_S),
        (Beat(1, Work.CALL, 0), NOTHING, CALLS * STUCK_S),
        (Beat(1, Work.CALL, 0), measured(of_16=20.0), CALLS * ROUNDS * 20.0),
    ],
)
def test_a_piece_of_work_may_take_what_its_size_and_the_rounds_before_explain(beat, slowest_s, patience_s):
    assert EngineWatch(STUCK_S).patience_s(beat, slowest_s) == patience_s


def test_the_first_round_of_an_engine_that_replaces_another_may_take_what_one_of_a_new_size_may():
    beat = Beat(1, Work.ROUND, 512)
    assert EngineWatch(STUCK_S, is_first=False).patience_s(beat, NOTHING) == UNKNOWN_SIZE * STUCK_S
    assert EngineWatch(STUCK_S, is_first=False).patience_s(beat, measured(of_512=0.1)) == STUCK_S


def looks(
    watch: EngineWatch, until_s: float, beat: Beat, *, unread: bool = False, step_s: float = LOOK_S
) -> list[Look]:
    return [
        watch.look(step_s * index, beat, measured(of_16=0.1), num_read=5, unread=unread)
        for index in range(1, int(until_s / step_s) + 1)
    ]


@pytest.mark.parametrize(
    ("beat", "unread"),
    [(Beat(7, Work.ROUND, 16), False), (Beat(7, Work.MESSAGE, 0), False), (Beat(7, Work.NONE, 0), True)],
)
def test_an_engine_at_one_piece_of_work_stalls_and_is_stuck_once_its_time_is_over(beat: Beat, unread: bool):
    found = looks(EngineWatch(STUCK_S), STUCK_S + 2.0, beat, unread=unread)
    assert not found[int(STUCK_S / 3 / LOOK_S) - 1].stalled
    assert found[int(STUCK_S / 2 / LOOK_S)] == Look(stalled=True)
    assert [look.stuck is not None for look in found].index(True) == int(STUCK_S / LOOK_S) + 1


def test_an_engine_without_work_is_never_stuck_and_one_that_begins_another_piece_is_not_either():
    assert set(looks(EngineWatch(STUCK_S), 300.0, Beat(7, Work.NONE, 0))) == {Look()}
    watch = EngineWatch(STUCK_S)
    for number in range(1000):
        now = number * STUCK_S / 2
        assert watch.look(now, Beat(number, Work.ROUND, 16), NOTHING, 5, unread=True) == Look()


def test_time_in_which_the_watcher_did_not_run_does_not_count():
    watch, beat = EngineWatch(STUCK_S), Beat(7, Work.ROUND, 16)
    looks(watch, 2.0, beat)
    assert watch.look(3600.0, beat, measured(of_16=0.1), 5, unread=False).stuck is None
