"""Host work of a steady round changes only with a table, whose rows a commit raises with a reason."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.runtime.fake_gpu import FakeGpu, fake_gpu, why_not
from tests.runtime.gpu_world import verifier
from tests.runtime.host_counts import BATCHES, KINDS, LAUNCHES, LIMITS, SPREAD, Counts, count_all, spread_of

SLACK = 0.9
"""A limit far above its count would let work come back unseen."""


Found = dict[tuple[str, int, str], Counts]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGpu]:
    if (reason := why_not()) is not None:
        pytest.skip(f"no fake GPU: {reason}")
    with pytest.MonkeyPatch.context() as patch, fake_gpu() as gpu:
        patch.setenv("WINGBEAT_CACHE_DIR", str(tmp_path_factory.mktemp("costs")))
        yield gpu


def check(found: Found) -> None:
    """Hold functions and operations to the limits, and what the device is asked for to its numbers."""
    print(*(f"{' '.join(map(str, key))}: {counts}" for key, counts in found.items()), sep="\n")
    for key, counts in found.items():
        for count, limit in zip(counts[:2], LIMITS[key], strict=True):
            assert SLACK * limit <= count <= limit, key
        assert (counts.launches, counts.graphs, counts.uploads) == LAUNCHES[key[0], key[2]], key


def test_rounds_of_a_sequence_alone_are_within_their_limits(gpu: FakeGpu):
    found = count_all(gpu, batches=(1,))
    assert found.keys() == {key for key in LIMITS if key[1] == 1}
    check(found)


@pytest.mark.slow
def test_a_reader_of_a_round_follows_few_files_and_types(gpu: FakeGpu):
    loaded = verifier()
    found = {(kind, side): part for kind in KINDS for side, part in spread_of(gpu, loaded, kind).items()}
    assert found.keys() == SPREAD.keys()
    for key, (files, records) in found.items():
        num_files, num_records = SPREAD[key]
        assert SLACK * num_files <= len(files) <= num_files, (key, sorted(files))
        assert SLACK * num_records <= len(records) <= num_records, (key, sorted(map(str, records)))


@pytest.mark.slow
def test_rounds_of_every_kind_and_size_are_within_their_limits(gpu: FakeGpu):
    """No sequence looks at the others, and neither operations nor a drafter's functions grow with a batch."""
    found = count_all(gpu)
    assert found.keys() == LIMITS.keys()
    check(found)
    for kind, side in LAUNCHES:
        rows = [found[kind, batch, side] for batch in BATCHES]
        assert max(row.operations for row in rows) == rows[0].operations
    for kind in KINDS:
        one, some, many = (found[kind, batch, "verifier"].functions for batch in BATCHES)
        assert (many - one) / (BATCHES[2] - 1) <= 1.05 * (some - one) / (BATCHES[1] - 1)
    assert len({found["adaptive tree", batch, "drafter"].functions for batch in BATCHES}) == 1


def test_the_documents_have_the_limits():
    text = (Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_launches.md").read_text()
    for (kind, batch, side), limits in LIMITS.items():
        counts = " | ".join(map(str, (*limits, *LAUNCHES[kind, side])))
        assert f"| {kind}, {batch} | {side} | {counts} |" in text
    for (kind, side), numbers in SPREAD.items():
        assert f"| {kind} | {side} | {' | '.join(map(str, numbers))} |" in text
