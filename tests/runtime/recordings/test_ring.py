"""The ring holds what it may, thins out what is old, and holds out prompts from training."""

import random
import stat

import pytest
import torch

from wingbeat.runtime.recordings.format import RecordingSpec
from wingbeat.runtime.recordings.live import FinishedSequence
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.recordings.ring import CHECKSUM_FILE, HELD, HELD_SHARE, TRAIN, RingWriter, RoundRing, is_held_out

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
    return FinishedSequence(tokens, [taps], 0, tokens[:20], taps.numel() * 4)


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
    assert ring.tidy().num_shards == 3
    assert not folder.exists()


def test_a_shard_that_was_damaged_on_disk_is_removed(tmp_path):
    ring = ring_of(tmp_path, Clock())
    written(ring, range(4))
    damaged = sorted(tmp_path.glob("*/*/shard-*"))[1]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert ring_of(tmp_path, Clock()).tidy().num_shards == 3
    assert not damaged.exists()


def test_a_shard_of_a_program_that_wrote_no_checksum_stays(tmp_path):
    ring = ring_of(tmp_path, Clock())
    written(ring, range(2))
    for path in tmp_path.glob(f"*/*/{CHECKSUM_FILE}"):
        path.unlink()
    assert ring.tidy().num_shards == 2


def test_nobody_but_their_owner_reads_the_rounds(tmp_path):
    ring = ring_of(tmp_path / "root" / "rounds", Clock())
    written(ring, range(20))
    paths = list((tmp_path / "root").rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}


@pytest.mark.parametrize("cached", [0, 1, 16, 48, 99])
def test_equal_prompts_are_on_one_side_however_much_of_them_was_cached_and_whatever_followed(cached):
    rng = random.Random(cached)
    held = 0
    for _ in range(2000):
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 100))]
        begin = min(cached, len(prompt) - 1)
        sides = set()
        for position in (0, begin):
            text = prompt + [rng.randrange(1000) for _ in range(20)]
            sides.add(is_held_out(FinishedSequence(text[position:], [], position, prompt, 0)))
        assert len(sides) == 1
        held += sides.pop()
    assert abs(held / 2000 - HELD_SHARE) < 0.05


def test_what_is_forgotten_is_gone_written_or_not_and_what_follows_stays(tmp_path):
    ring = ring_of(tmp_path, Clock())
    written(ring, range(5))
    writer = RingWriter(ring, SPEC, shard_bytes=10**9)
    for number in (10, None, 11):
        if number is None:
            writer.forget()
        else:
            writer.reserve(sequence(number).num_bytes)
            writer.put(sequence(number))
    writer.close(LONG_S)
    assert kept_numbers(tmp_path) == [11]
    assert ring.forgotten_at > 0
    assert ring_of(tmp_path / "other", Clock()).forgotten_at == 0
