"""Recordings on disk: what is written is what is read, damage is named, and batches are a function of seed and step."""

import json
from collections import Counter

import pytest
import torch

from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.recordings.format import INDEX_FILE, Record, RecordingError, RecordingSpec, read_index
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.recordings.writer import RecordingFull, RecordingWriter

VOCAB, HIDDEN, TOP_K = 50, 6, 3
PLENTY = 10**9


def spec(**changes) -> RecordingSpec:
    fields = dict(
        verifier="tiny",
        fingerprint="f0",
        tap_layers=(1, 4),
        hidden_size=HIDDEN,
        num_layers=4,
        vocab_size=VOCAB,
        taps_dtype="bfloat16",
        top_k=TOP_K,
        logits_dtype="float32",
        settings={"seed": 1, "corpus": "here"},
    )
    return RecordingSpec(**fields | changes)


def record(length: int, seed: int, top_k: int = TOP_K, position: int = 0) -> Record:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(VOCAB, (length,), generator=generator, dtype=torch.int32)
    taps = torch.randn(length, 2 * HIDDEN, generator=generator).bfloat16()
    mask = torch.rand(length, generator=generator) < 0.5
    if not top_k:
        return Record(token_ids, taps, mask, position)
    logits = torch.randn(length, VOCAB, generator=generator)
    top = logits.topk(top_k)
    return Record(token_ids, taps, mask, position, top.indices.int(), top.values, logits.logsumexp(-1))


def write(folder, lengths, per_shard=3, **changes) -> list[Record]:
    writer = RecordingWriter(folder, spec(**changes), PLENTY)
    top_k = writer.index.spec.top_k
    records = [record(length, seed, top_k, position=10 * seed) for seed, length in enumerate(lengths)]
    for number, one in enumerate(records, 1):
        writer.add(one)
        if number % per_shard == 0:
            writer.flush()
    writer.flush()
    writer.finish()
    return records


def assert_equal(left: Record, right: Record) -> None:
    for name, one, other in zip(Record._fields, left, right, strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, name
            assert torch.equal(one, other), name
        else:
            assert one == other, name


@pytest.mark.parametrize("top_k", [0, TOP_K])
def test_sequences_are_read_as_they_were_written(tmp_path, top_k):
    written = write(tmp_path, (5, 1, 40, 8), top_k=top_k)
    reader = RecordingReader(tmp_path)
    for one, other in zip(reader.records(), written, strict=True):
        assert_equal(one, other)
    assert (reader.num_sequences, reader.num_tokens) == (4, 54)
    assert reader.spec == spec(top_k=top_k)
    weights = torch.bincount(torch.cat([r.token_ids[r.loss_mask] for r in written]), minlength=50).double()
    for record in written if top_k else ():
        likely = (record.top_logits.double() - record.logsumexp[:, None]).exp()
        weights.index_add_(0, record.top_ids.flatten(), likely.flatten())
    torch.testing.assert_close(reader.token_weights(), weights)


def test_the_index_adds_up_to_the_files(tmp_path):
    write(tmp_path, (5, 7, 9, 2))
    index = read_index(tmp_path)
    assert index.complete
    assert [shard.num_tokens for shard in index.shards] == [21, 2]
    assert index.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


def test_top_logits_and_their_logsumexp_give_the_exact_probabilities(tmp_path):
    writer = RecordingWriter(tmp_path, spec(), PLENTY)
    one = record(12, seed=3)
    writer.add(one)
    writer.flush()
    batch = RecordingReader(tmp_path).batch(0, 1, 12)
    probabilities = (batch.target_top_logits - batch.logsumexp[..., None]).exp()[0]
    logits = torch.randn(12, VOCAB, generator=_after_taps(3, 12))
    torch.testing.assert_close(probabilities, logits.softmax(-1).gather(1, batch.target_top_ids[0]))


def _after_taps(seed: int, length: int) -> torch.Generator:
    """The generator of `record` where it draws logits."""
    generator = torch.Generator().manual_seed(seed)
    torch.randint(VOCAB, (length,), generator=generator, dtype=torch.int32)
    torch.randn(length, 2 * HIDDEN, generator=generator)
    torch.rand(length, generator=generator)
    return generator


def test_a_batch_depends_on_seed_and_step_alone(tmp_path):
    write(tmp_path, (30, 16, 40, 8, 21))
    reader = RecordingReader(tmp_path, seed=7)
    later = reader.batch(9, 4, 8)
    again = RecordingReader(tmp_path, seed=7).batch(9, 4, 8)
    assert all(torch.equal(one, other) for one, other in zip(later, again, strict=True))
    assert not torch.equal(RecordingReader(tmp_path, seed=8).batch(9, 4, 8).token_ids, later.token_ids)
    assert not torch.equal(reader.batch(10, 4, 8).token_ids, later.token_ids)


def find(records: list[Record], window: torch.Tensor) -> tuple[int, int]:
    """The sequence a window is from, and where it begins there."""
    places = [
        (number, begin)
        for number, one in enumerate(records)
        for begin in range(len(one.token_ids) - len(window) + 1)
        if torch.equal(one.token_ids[begin : begin + len(window)].long(), window)
    ]
    assert len(places) == 1
    return places[0]


def test_an_epoch_reads_every_window_of_every_sequence_once(tmp_path):
    written = write(tmp_path, (16, 24, 5, 17))
    reader = RecordingReader(tmp_path)
    assert reader.num_windows(8) == 2 + 3 + 1 + 2
    seen = Counter()
    for step in range(4, 8):
        batch = reader.batch(step, 2, 8)
        for row, length in enumerate(batch.lengths.tolist()):
            sequence, begin = find(written, batch.token_ids[row, :length])
            assert int(batch.positions[row]) == 10 * sequence + begin
            assert torch.equal(batch.taps[row, :length], written[sequence].taps[begin : begin + length])
            seen[sequence] += length
    assert seen == {0: 16, 1: 24, 2: 5, 3: 16}


def test_padding_is_masked_and_without_probability(tmp_path):
    write(tmp_path, (5,))
    batch = RecordingReader(tmp_path).batch(0, 1, 8)
    assert batch.lengths.tolist() == [5]
    assert not batch.loss_mask[0, 5:].any()
    assert (batch.target_top_logits - batch.logsumexp[..., None]).exp()[0, 5:].eq(0).all()


def test_a_recording_without_logits_has_none_in_its_batches(tmp_path):
    write(tmp_path, (9, 9), top_k=0)
    batch = RecordingReader(tmp_path).batch(0, 2, 8)
    assert (batch.target_top_ids, batch.target_top_logits, batch.logsumexp) == (None, None, None)


def test_folders_of_one_verifier_are_one_data_set(tmp_path):
    written = write(tmp_path / "a", (5, 6)) + write(tmp_path / "b", (7,))
    assert [len(r.token_ids) for r in RecordingReader(tmp_path).records()] == [len(r.token_ids) for r in written]


def test_folders_of_two_verifiers_are_refused(tmp_path):
    write(tmp_path / "a", (5,))
    write(tmp_path / "b", (5,), fingerprint="f1")
    with pytest.raises(RecordingError, match="fingerprint is f1, not f0"):
        RecordingReader(tmp_path)


def test_a_recording_of_another_verifier_is_refused(tmp_path):
    write(tmp_path, (5,))
    RecordingReader(tmp_path).check_verifier("f0")
    with pytest.raises(RecordingError, match="verifier tiny"):
        RecordingReader(tmp_path).check_verifier("f1")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / INDEX_FILE).unlink(), "holds no recording"),
        (lambda folder: (folder / INDEX_FILE).write_text("{"), "is not valid JSON"),
        (lambda folder: (folder / INDEX_FILE).write_text('{"format": "other"}'), "is not the index of a recording"),
        (lambda folder: _edit(folder, version=2), "format version 2"),
        (lambda folder: _edit(folder, shards=[{"file": "x"}]), "shards.0.num_sequences"),
        (lambda folder: (folder / "shard-00001.safetensors").unlink(), "shard-00001.safetensors is missing"),
        (lambda folder: _cut_short(folder / "shard-00000.safetensors"), "it is truncated"),
        (lambda folder: _edit(folder, shards=[]), "holds no sequences yet"),
    ],
    ids=["no index", "no JSON", "other format", "other version", "bad field", "missing", "cut short", "empty"],
)
def test_damage_is_named(tmp_path, damage, message):
    write(tmp_path, (5, 6, 7, 8))
    damage(tmp_path)
    with pytest.raises(RecordingError, match=message):
        RecordingReader(tmp_path)


def _edit(folder, **changes) -> None:
    path = folder / INDEX_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _cut_short(path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def test_a_shard_beyond_the_bound_is_not_written(tmp_path):
    bytes_per_token = spec().bytes_per_token
    writer = RecordingWriter(tmp_path, spec(), max_bytes=60 * bytes_per_token + 2 * 4096 + 100)
    for seed in range(2):
        writer.add(record(30, seed))
        writer.flush()
    writer.add(record(100, 2))
    with pytest.raises(RecordingFull, match="max_bytes is"):
        writer.flush()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) <= writer.max_bytes
    assert RecordingReader(tmp_path).num_sequences == 2


def test_a_sequence_of_another_shape_is_refused(tmp_path):
    writer = RecordingWriter(tmp_path, spec(), PLENTY)
    with pytest.raises(ValueError, match=r"taps of a recorded sequence is torch\.float32"):
        writer.add(record(4, 0)._replace(taps=torch.zeros(4, 2 * HIDDEN)))
    with pytest.raises(ValueError, match="logsumexp of a recorded sequence is nothing"):
        writer.add(record(4, 0)._replace(logsumexp=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "f1"}, "fingerprint f0, not f1"),
        ({"tap_layers": (1, 2)}, "tap_layers"),
        ({"settings": {"seed": 2, "corpus": "here"}}, "seed 1, not 2"),
    ],
)
def test_a_recording_is_continued_only_with_what_it_was_begun_with(tmp_path, changes, message):
    write(tmp_path, (5,))
    with pytest.raises(RecordingError, match=message):
        RecordingWriter(tmp_path, spec(**changes), PLENTY)


def test_what_a_kill_left_beside_the_index_is_removed(tmp_path):
    write(tmp_path, (5,))
    for name in ("shard-00001.safetensors", "shard-00001.safetensors.tmp"):
        (tmp_path / name).write_bytes(b"half")
    writer = RecordingWriter(tmp_path, spec(), PLENTY)
    assert writer.num_sequences == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [INDEX_FILE, "shard-00000.safetensors"]


def test_a_fingerprint_follows_weights_and_config_and_not_the_copy(tmp_path):
    def checkpoint(name: str, weights: bytes, **config) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"rope_theta": 1.0} | config))
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        return checkpoint_fingerprint(tmp_path / name)

    weights = bytes(range(256)) * 2000
    base = checkpoint("base", weights)
    assert checkpoint("copy", weights, transformers_version="9") == base
    assert checkpoint("tuned", weights[::-1]) != base
    assert checkpoint("longer", weights + b"x") != base
    assert checkpoint("rope", weights, rope_theta=2.0) != base


def test_equal_prompts_are_on_one_side_of_what_is_held_out(tmp_path):
    writer = RecordingWriter(tmp_path, spec(), 10**9)
    prompts = [index % 200 for index in range(600)]
    for index, prompt in enumerate(prompts):
        one = record(12, seed=index)
        token_ids = one.token_ids.clone()
        token_ids[:4] = torch.tensor([prompt % 50, prompt // 50, 7, 7])
        writer.add(one._replace(token_ids=token_ids, loss_mask=torch.arange(12) >= 4))
    writer.flush()

    def side(held_out: bool | None) -> list[tuple[int, ...]]:
        return [tuple(one.token_ids[:4].tolist()) for one in RecordingReader(tmp_path, held_out=held_out).records()]

    held, trained = side(True), side(False)
    assert sorted(held + trained) == sorted(side(None))
    assert not set(held) & set(trained)
    # Prompts three times each, of a binomial of 200 with a share of 1/32: four standard deviations.
    assert len(held) % 3 == 0
    assert abs(len(held) / 3 - 200 / 32) < 4 * (200 / 32) ** 0.5
