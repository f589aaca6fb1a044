"""Processes between clients and engines die or stand still: which requests are answered, and after which time.

pytest tests/chaos/test_front.py -m chaos --chaos-times 20 -s
"""

import pytest

from tests.chaos.front import CELLS, LAST_CELLS, play, play_last

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(3000)]
SLOW_MACHINE = 4.0
"""Bounds are those of a machine with processors to spare."""


@pytest.mark.parametrize("name", CELLS)
def test_requests_go_on_or_are_answered_again_within_a_bound(name: str, request: pytest.FixtureRequest):
    times = request.config.getoption("--chaos-times", 1)
    cell, outcome = CELLS[name], play(name, times)
    print(f"{name}: {outcome}")
    assert outcome.times == times
    assert outcome.wrong == []
    assert outcome.cut == 0 or cell.breaks
    assert outcome.refused == 0 or cell.refuses
    assert max(outcome.back_s) < SLOW_MACHINE * cell.bound_s


@pytest.mark.parametrize("victim", LAST_CELLS)
def test_the_death_of_what_holds_all_together_leaves_nothing(victim: str):
    print(f"kill {victim}: nothing is left after {play_last(victim):.1f} s")
