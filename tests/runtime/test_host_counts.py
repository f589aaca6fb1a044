"""What a steady round asks of the host changes only with a table, whose rows a commit raises with a reason."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.runtime.fake_gpu import fake_gpu, why_not
from tests.runtime.host_counts import BATCHES, LAUNCHES, LIMITS, Counts, count_all

SLACK = 0.9
"""A limit far above its count would let work come back unseen."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[tuple[str, int, str], Counts]:
    if (reason := why_not()) is not None:
        pytest.skip(f"no fake GPU: {reason}")
    with pytest.MonkeyPatch.context() as patch, fake_gpu() as gpu:
        patch.setenv("WINGBEAT_CACHE_DIR", str(tmp_path_factory.mktemp("costs")))
        found = count_all(gpu)
    print(*(f"{' '.join(map(str, key))}: {counts}" for key, counts in found.items()), sep="\n")
    return found


def test_every_kind_of_round_is_counted(counted):
    assert counted.keys() == LIMITS.keys()


@pytest.mark.parametrize("key", LIMITS, ids=lambda key: "-".join(map(str, key)).replace(" ", "_"))
def test_functions_and_operations_of_a_round_are_within_their_limits(counted, key):
    for found, limit in zip(counted[key][:2], LIMITS[key], strict=True):
        assert SLACK * limit <= found <= limit


@pytest.mark.parametrize("key", LAUNCHES, ids="-".join)
def test_operations_launches_and_uploads_do_not_grow_with_the_batch(counted, key):
    kind, side = key
    rows = [counted[kind, batch, side] for batch in BATCHES]
    assert {(row.launches, row.graphs, row.uploads) for row in rows} == {LAUNCHES[key]}
    assert max(row.operations for row in rows) == rows[0].operations


@pytest.mark.parametrize("kind", ["plain", "adaptive tree"])
def test_a_sequence_costs_the_same_functions_in_a_large_batch(counted, kind):
    """No sequence looks at the others."""
    one, some, many = (counted[kind, batch, "verifier"].functions for batch in BATCHES)
    assert (many - one) / (BATCHES[2] - 1) <= 1.05 * (some - one) / (BATCHES[1] - 1)


def test_a_drafter_enters_as_many_functions_for_any_batch(counted):
    assert len({counted["adaptive tree", batch, "drafter"].functions for batch in BATCHES}) == 1


def test_the_documents_have_the_limits():
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    for (kind, batch, side), limits in LIMITS.items():
        counts = " | ".join(map(str, (*limits, *LAUNCHES[kind, side])))
        assert f"| {kind}, {batch} | {side} | {counts} |" in text
