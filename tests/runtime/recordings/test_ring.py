"""The ring holds what it may, thins out what is old, and holds out prompts from training."""

import pytest
import torch

from wingbeat.runtime.recordings.format import RecordingSpec
from wingbeat.runtime.recordings.live import FinishedSequence
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.recordings.ring import HELD, HELD_SHARE, TRAIN, RingWriter, RoundRing, is_held_out

HIDDEN, TOKENS = 8, 50
DAY_S = 86400.0
LONG_S = 300.0
SPEC = RecordingSpec(
    verifier="v",
    fingerprint="f",
    tap_layers=(1, 2),
    hidden_size=HIDDEN,
    num_layers=3,
    vocab_size=1000,
    taps_dtype="float32",
    top_k=0,
    logits_dtype="float32",
    settings={"source": "live"},
)


class Clock:
    """Seconds since 1970, as a test has them; a little more at each look, so that no two shards are of one moment."""

    def __init__(self):
        self.now = 1.7e9

    def __call__(self):
        self.now += 1e-3
        return self.now


def sequence(number):
    """A request whose tokens are its number and what follows."""
    tokens = [(number + i) % 1000 for i in range(TOKENS)]
    taps = torch.full((TOKENS, SPEC.taps_size), float(number))
    return FinishedSequence(tokens, [taps], 0, 20, taps.numel() * 4)


def ring_of(folder, clock, max_bytes=100_000, expire_s=DAY_S):
    return RoundRing(folder, max_bytes, expire_s, clock)


def written(ring, numbers, clock=None, step_s=0.0):
    """Each request is a shard of its own."""
    writer = RingWriter(ring, SPEC, shard_bytes=1)
    for number in numbers:
        if clock is not None:
            clock.now += step_s
        one = sequence(number)
        assert writer.reserve(one.num_bytes)
        writer.put(one)
    # Its thread gives way to all others, which may take a while.
    writer.close(LONG_S)
    return writer


def bytes_below(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def kept_numbers(folder):
    found = []
    for part in (TRAIN, HELD):
        if any((folder / part).glob("*/index.json")):
            found += [int(record.taps[0, 0]) for record in RecordingReader(folder / part).records()]
    return sorted(found)


@pytest.mark.slow
def test_prompts_are_held_out_by_what_they_say_and_nothing_is_on_both_sides(tmp_path):
    ring = ring_of(tmp_path, Clock(), max_bytes=10**7)
    written(ring, [*range(200), *range(50)])
    train = {int(record.taps[0, 0]) for record in RecordingReader(tmp_path / TRAIN).records()}
    held = {int(record.taps[0, 0]) for record in RecordingReader(tmp_path / HELD).records()}
    assert train | held == set(range(200))
    assert not train & held
    assert 0.5 * HELD_SHARE < len(held) / 200 < 1.6 * HELD_SHARE
    assert held == {number for number in range(200) if is_held_out(sequence(number))}


@pytest.mark.slow
def test_a_days_traffic_stays_within_the_bound_and_leaves_samples_of_all_ages(tmp_path):
    """A request every 12 minutes over a day and a half, in 60 kB: a dozen of them fit."""
    clock = Clock()
    ring = ring_of(tmp_path, clock, max_bytes=60_000)
    most = 0
    for begin in range(0, 180, 10):
        written(ring, range(begin, begin + 10), clock, 720.0)
        most = max(most, bytes_below(tmp_path))
    assert most <= 60_000
    kept = kept_numbers(tmp_path)
    assert len(kept) >= 5
    assert kept[-1] >= 170, "the newest are there"
    assert kept[0] < 160, "and older ones"
    assert kept[0] >= 180 - 121, "none is older than a day"


def test_what_is_too_old_goes_where_nothing_new_comes(tmp_path):
    clock = Clock()
    ring = ring_of(tmp_path, clock)
    written(ring, range(3))
    assert ring.tidy().num_shards == 3
    clock.now += DAY_S
    assert ring.tidy() == (0, 0)
    assert kept_numbers(tmp_path) == []


def test_a_shard_that_is_larger_than_the_ring_is_dropped_and_counted(tmp_path):
    writer = written(ring_of(tmp_path, Clock(), max_bytes=2000), range(2))
    assert writer.stats.num_dropped == 2
    assert writer.stats.stopped is None
    assert bytes_below(tmp_path) <= 2000


def test_a_writer_that_was_killed_leaves_a_folder_that_readers_pass_over(tmp_path):
    clock = Clock()
    ring = ring_of(tmp_path, clock)
    written(ring, range(3))
    folder = ring.new_folder(False)
    folder.mkdir(parents=True)
    (folder / "shard-00000.safetensors.tmp").write_bytes(b"x" * 100)
    assert kept_numbers(tmp_path) == [0, 1, 2]
    clock.now += DAY_S
    ring.tidy()
    assert not folder.exists()
