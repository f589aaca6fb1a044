"""Launches of a GPU change only with the table, whose rows a commit raises with a reason."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.runtime.fake_gpu import fake_gpu, why_not
from tests.runtime.launch_counts import LIMITS, counts


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    if (reason := why_not()) is not None:
        pytest.skip(f"no fake GPU: {reason}")
    with fake_gpu() as gpu:
        return counts(gpu)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_launches_are_no_more_than_their_limit_and_no_fewer(counted, name):
    """A limit above the count would let launches come back unseen."""
    assert counted[name] == LIMITS[name]


def test_the_document_has_the_limits():
    text = (Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_launches.md").read_text(encoding="utf-8")
    missing = [name for name, limit in LIMITS.items() if f"| {name} | {limit} |" not in text]
    assert not missing
