"""Whatever goes wrong in whichever application: no request lost, no other text, nothing left over, and it recovers."""

import pytest

from tests.chaos.conftest import Stage
from tests.chaos.scenarios import CELLS

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("stage", "act"), CELLS, indirect=["stage"], scope="module")
def test_nothing_is_lost_changed_or_left_over(stage: Stage, act: str):
    found = stage.play(act)
    print(act, found)
    assert found["num_under_way"] > 0
    assert found["num_requests"] > 0
    assert {name: found[name] for name in ("failures", "differences", "leaks", "not back")} == {
        "failures": [],
        "differences": [],
        "leaks": [],
        "not back": [],
    }
