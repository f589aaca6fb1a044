"""The processes of verifiers and drafters, each ended and stopped again and again, beside idle connections.

pytest tests/chaos/test_repeated.py -m chaos --chaos-times 20 -s
"""

from statistics import median

import pytest

from tests.chaos.conftest import Stage
from tests.chaos.scenarios import REPEATED

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(4 * 3600)]
MUST_BE_EMPTY = ("failures", "differences", "leaks", "not back")
CELLS = [(scenario, act) for scenario, acts in REPEATED.items() for act in acts]


@pytest.mark.parametrize(("stage", "act"), CELLS, indirect=["stage"], scope="module")
def test_nothing_is_lost_however_often_it_is_done(stage: Stage, act: str, request: pytest.FixtureRequest):
    times = request.config.getoption("--chaos-times", 1)
    played = [stage.play(act) for _ in range(times)]
    counts = {name: sum(len(one[name]) for one in played) for name in MUST_BE_EMPTY}
    seconds = [one["seconds"] for one in played]
    num_requests = sum(one["num_requests"] for one in played)
    print(
        f"\n{request.node.callspec.id}: {times} times, {num_requests} requests, {counts}; whole again after "
        f"{median(seconds):.1f} s (median), {max(seconds):.1f} s (longest)"
    )
    assert counts == dict.fromkeys(MUST_BE_EMPTY, 0), [one for one in played if any(one[name] for name in counts)][:3]
    assert all(one["num_under_way"] and one["num_requests"] for one in played)
