"""Recorded traffic: what rounds compute anyway is what a plain forward pass computes; recording changes no token."""

import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from tests.runtime.models import Run, eagle_drafter, engine_config, greedy_params, reference
from tests.runtime.recorded_graphs import RecordingDevice
from tests.runtime.scripted import ScriptedDrafter, random_tree, right_tree
from tests.runtime.watchers import dense_taps
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.recordings import live_writer
from wingbeat.runtime.recordings.format import Record, RecordingSpec
from wingbeat.runtime.recordings.live import MIN_TOKENS, LiveRecording, is_sampled
from wingbeat.runtime.recordings.live_writer import LiveWriter
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.recordings.ring import is_held_out

pytestmark = pytest.mark.few(1)

SHORT = 40
TAPS = (1, 2, 3)
"""Taps of `models.random_head`."""
PLENTY = 10**9
TIGHT = {"max_model_len": 128, "num_kv_blocks": 12, "max_num_batched_tokens": 33}


class TappingScript(ScriptedDrafter):
    """Reads tokens alone, over a verifier that is tapped for the recording."""

    needs = DrafterNeeds(TAPS)


@pytest.fixture(scope="module")
def ref():
    return reference("llama")


@pytest.fixture(scope="module")
def true_taps(ref):
    return dense_taps(ref, TAPS)


@pytest.fixture
def engine_of(ref):
    made = []

    def make(kind="none", graph_device=None, **overrides):
        plans = {"right": right_tree, "random": random_tree}
        config = engine_config(**overrides)
        if kind == "none":
            made.append(Engine(ref.loaded, config, DrafterNeeds(TAPS), graph_device))
            return made[-1]
        if kind == "eagle":
            drafter = eagle_drafter(ref.loaded, config.speculation)
        else:
            drafter = TappingScript(ref.sequences, plans[kind], ref.loaded.vocab_size)
        made.append(build_engine(ref.loaded, config, drafter, InProcessChannel, graph_device))
        return made[-1]

    yield make
    for engine in made:
        engine.model.remove_taps()


@pytest.fixture
def writer_of(ref, tmp_path):
    made = []

    def make(dtype="float32", max_bytes=PLENTY, **limits):
        spec = RecordingSpec(
            verifier="llama",
            fingerprint="f",
            tap_layers=TAPS,
            hidden_size=ref.loaded.hidden_size,
            num_layers=len(ref.loaded.layers),
            vocab_size=ref.loaded.vocab_size,
            taps_dtype=dtype,
            top_k=0,
            logits_dtype=dtype,
            settings={"source": "live"},
        )
        made.append(LiveWriter(tmp_path / "live" / f"engine{len(made)}", tmp_path / "live", spec, max_bytes, **limits))
        return made[-1]

    yield make
    for writer in made:
        writer.close()


def observed(engine, writer, share=1.0, dtype=torch.float32) -> LiveRecording:
    recording = LiveRecording(writer, share, len(TAPS) * engine.loaded.hidden_size, dtype)
    engine.observe(recording)
    return recording


def recorded(tmp_path) -> list[Record]:
    """All that was written."""
    return list(RecordingReader(tmp_path / "live").records())


def assert_true(records, ref, true_taps, params_tokens=SHORT) -> list[int]:
    """Every record is a piece of a reference sequence with that sequence's hidden states; returns which."""
    found = []
    for record in records:
        tokens = record.token_ids.tolist()
        [index] = [
            index
            for index, sequence in enumerate(ref.sequences)
            if sequence[record.position : record.position + len(tokens)] == tokens
        ]
        expected = true_taps[index][record.position : record.position + len(tokens)]
        torch.testing.assert_close(record.taps, expected, rtol=1e-3, atol=1e-4)
        prompt = len(ref.prompts[index])
        # The last token was computed only where it was accepted from a tree.
        assert record.position + len(tokens) - prompt in (params_tokens - 1, params_tokens)
        assert record.loss_mask.tolist() == [
            position >= prompt for position in range(record.position, record.position + len(tokens))
        ]
        found.append(index)
    return found


@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "one behind"])
@pytest.mark.parametrize("kind", ["none", "right", "random", "eagle"])
def test_taps_are_those_of_a_plain_forward_pass(ref, true_taps, engine_of, writer_of, tmp_path, kind, overlap):
    engine, writer = engine_of(kind, overlap=overlap), writer_of()
    observed(engine, writer)
    assert Run(engine, ref.prompts, greedy_params(SHORT)).finish() == [c[:SHORT] for c in ref.continuations]
    writer.close()
    records = recorded(tmp_path)
    assert sorted(assert_true(records, ref, true_taps)) == list(range(8))
    assert all(record.position == 0 for record in records)
    assert writer.stats.num_sequences == 8
    assert writer.stats.num_dropped == 0
    if kind == "right":
        assert engine.stats().speculation.num_accepted_tokens > 50


@pytest.mark.slow
def test_rounds_that_are_replayed_overwrite_nothing_that_was_recorded(ref, true_taps, engine_of, writer_of, tmp_path):
    engine, writer = engine_of("right", RecordingDevice(), overlap=True), writer_of()
    observed(engine, writer)
    assert Run(engine, ref.prompts, greedy_params(SHORT)).finish() == [c[:SHORT] for c in ref.continuations]
    writer.close()
    assert sum(engine.stats().graphs.replays.values()) > 3
    assert sorted(assert_true(recorded(tmp_path), ref, true_taps)) == list(range(8))


@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "one behind"])
def test_preempted_sequences_are_recorded_once(ref, true_taps, engine_of, writer_of, tmp_path, overlap):
    engine, writer = engine_of("right", overlap=overlap, **TIGHT), writer_of()
    observed(engine, writer)
    assert Run(engine, ref.prompts, greedy_params(SHORT)).finish() == [c[:SHORT] for c in ref.continuations]
    writer.close()
    assert engine.stats().num_preemptions > 0
    assert sorted(assert_true(recorded(tmp_path), ref, true_taps)) == list(range(8))


@pytest.mark.slow
def test_what_came_from_the_prefix_cache_is_left_out(ref, true_taps, engine_of, writer_of, tmp_path):
    engine, writer = engine_of("none"), writer_of()
    Run(engine, [ref.prompts[4]], greedy_params(4)).finish()
    observed(engine, writer)
    Run(engine, [ref.prompts[4]], greedy_params(SHORT)).finish()
    writer.close()
    [record] = recorded(tmp_path)
    assert record.position == 48
    assert assert_true([record], ref, true_taps) == [4]


class Memory:
    """A sink that keeps what it is given."""

    is_open = True

    def __init__(self):
        self.sequences = []

    def reserve(self, num_bytes):
        return True

    def give_back(self, num_bytes, dropped):
        raise AssertionError("nothing was to be dropped")

    def put(self, sequence):
        self.sequences.append(sequence)


def test_a_sequence_is_told_with_its_whole_prompt_also_where_that_was_cached(ref, engine_of):
    engine, sink = engine_of("none"), Memory()
    observed(engine, sink)
    for tokens in (8, SHORT):
        Run(engine, [ref.prompts[4]], greedy_params(tokens)).finish()
    first, second = sink.sequences
    assert (first.position, second.position) == (0, 48)
    assert first.prompt == second.prompt == ref.prompts[4]
    assert is_held_out(first) == is_held_out(second)


def test_an_aborted_request_is_recorded_as_far_as_it_came(ref, engine_of, writer_of, tmp_path):
    engine, writer = engine_of("none"), writer_of()
    observed(engine, writer)
    run = Run(engine, [ref.prompts[1]], greedy_params(SHORT))
    while len(run.tokens[0]) < 11:
        run.step()
    engine.abort_request("0")
    run.finish()
    writer.close()
    [record] = recorded(tmp_path)
    assert record.token_ids.tolist() == [*ref.prompts[1], *ref.continuations[1][:10]]


@pytest.mark.slow
def test_very_short_sequences_are_left_out(ref, engine_of, writer_of, tmp_path):
    engine, writer = engine_of("none"), writer_of()
    observed(engine, writer)
    Run(engine, [ref.prompts[3]], greedy_params(MIN_TOKENS - len(ref.prompts[3]))).finish()
    writer.close()
    assert not (tmp_path / "live").exists()
    assert writer.reserve(1)


def test_the_share_is_of_requests_and_follows_from_their_ids(ref, true_taps, engine_of, writer_of, tmp_path):
    ids = [f"client:{number}" for number in range(4000)]
    chosen = [is_sampled(one, 0.25) for one in ids]
    # Four standard deviations of a binomial of 4000.
    assert abs(sum(chosen) - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5
    assert all(is_sampled(one, 0.5) for one, was in zip(ids, chosen, strict=True) if was)
    assert not any(is_sampled(one, 0.0) for one in ids)
    engine, writer = engine_of("right"), writer_of()
    observed(engine, writer, share=0.5)
    Run(engine, ref.prompts, greedy_params(SHORT)).finish()
    writer.close()
    wanted = [number for number in range(8) if is_sampled(str(number), 0.5)]
    assert 0 < len(wanted) < 8
    got = assert_true(recorded(tmp_path), ref, true_taps)
    assert sorted(got) == wanted


def test_without_memory_sequences_are_dropped_and_counted(ref, true_taps, engine_of, writer_of, tmp_path):
    row_bytes = len(TAPS) * ref.loaded.hidden_size * 4
    engine, writer = engine_of("right"), writer_of(memory_bytes=200 * row_bytes)
    observed(engine, writer)
    assert Run(engine, ref.prompts, greedy_params(SHORT)).finish() == [c[:SHORT] for c in ref.continuations]
    writer.close()
    stats = writer.stats
    assert stats.num_dropped > 0
    assert stats.num_sequences + stats.num_dropped == 8
    assert len(assert_true(recorded(tmp_path), ref, true_taps)) == stats.num_sequences
    # All of the memory has come back.
    assert writer.reserve(200 * row_bytes)
    assert not writer.reserve(1)


@pytest.mark.slow
def test_the_bound_of_disk_is_that_of_all_engines_together(ref, engine_of, writer_of, tmp_path):
    first = writer_of()
    engine = engine_of("none")
    observed(engine, first)
    Run(engine, ref.prompts, greedy_params(SHORT)).finish()
    first.close()
    # A killed server's unfinished shard takes room as well.
    (tmp_path / "live" / "killed").mkdir()
    (tmp_path / "live" / "killed" / "shard-00000.safetensors.tmp").write_bytes(bytes(10**6))
    used = sum(path.stat().st_size for path in (tmp_path / "live").rglob("shard-*"))
    second = writer_of(max_bytes=used + 5000)
    observed(engine, second)
    Run(engine, ref.prompts, greedy_params(SHORT)).finish()
    second.close()
    assert (second.stats.num_sequences, second.stats.num_dropped) == (0, 8)
    assert "max_bytes" in second.stats.stopped
    assert sum(path.stat().st_size for path in (tmp_path / "live").rglob("shard-*")) == used
    # From then on nothing is copied, and rounds go on.
    assert not second.is_open
    assert Run(engine, ref.prompts, greedy_params(SHORT)).finish() == [c[:SHORT] for c in ref.continuations]


def test_a_quiet_server_writes_what_it_has(ref, engine_of, writer_of, tmp_path):
    engine, writer = engine_of("none"), writer_of(flush_s=0.05)
    observed(engine, writer)
    Run(engine, [ref.prompts[0]], greedy_params(SHORT)).finish()
    deadline = time.monotonic() + 20
    while writer.stats.num_sequences < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert RecordingReader(tmp_path / "live").num_sequences == 1


@pytest.mark.slow
def test_a_full_shard_is_written_while_the_server_is_busy(ref, engine_of, writer_of, tmp_path):
    engine, writer = engine_of("none"), writer_of(shard_bytes=20_000)
    observed(engine, writer)
    Run(engine, ref.prompts, greedy_params(SHORT)).finish()
    writer.close()
    assert len(list((tmp_path / "live").rglob("shard-*"))) > 2
    assert RecordingReader(tmp_path / "live").num_sequences == 8


@pytest.mark.slow
def test_a_slow_disk_holds_up_no_round(ref, engine_of, writer_of, tmp_path, monkeypatch):
    opened = threading.Event()

    class Stuck(live_writer.RecordingWriter):
        def add(self, record):
            opened.wait(30)
            super().add(record)

    monkeypatch.setattr(live_writer, "RecordingWriter", Stuck)
    engine, writer = engine_of("none"), writer_of()
    observed(engine, writer)
    assert Run(engine, ref.prompts, greedy_params(SHORT)).finish() == [c[:SHORT] for c in ref.continuations]
    assert writer.stats.num_sequences == 0
    opened.set()
    writer.close()
    assert writer.stats.num_sequences == 8


SCRIPT = """
import itertools, pathlib, sys, torch
from wingbeat.runtime.recordings.format import RecordingSpec
from wingbeat.runtime.recordings.live import FinishedSequence
from wingbeat.runtime.recordings.live_writer import LiveWriter
root = pathlib.Path(sys.argv[1])
spec = RecordingSpec.model_validate_json(sys.argv[2])
writer = LiveWriter(root / "engine", root, spec, 10**9, shard_bytes=4000)
for number in itertools.count():
    taps = torch.full((10, spec.taps_size), float(number % 256))
    while not writer.reserve(taps.nbytes):
        pass
    tokens = [number % spec.vocab_size] * 10
    writer.put(FinishedSequence(tokens, [taps], 0, tokens[:3], taps.nbytes))
"""


@pytest.mark.slow
def test_a_killed_server_leaves_every_shard_but_its_last(ref, writer_of, tmp_path):
    spec = writer_of().spec.model_copy(update={"hidden_size": 8})
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "live"), spec.model_dump_json()])
    deadline = time.monotonic() + 60
    try:
        while not (tmp_path / "live" / "engine" / "shard-00004.safetensors").exists() and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    records = recorded(tmp_path)
    assert len(records) >= 4 * (4000 // (10 * spec.bytes_per_token))
    for number, record in enumerate(records):
        assert record.token_ids.tolist() == [number % spec.vocab_size] * 10
        assert record.taps.eq(number % 256).all()


def test_an_observer_may_come_and_go_between_rounds(ref, engine_of, writer_of, tmp_path):
    engine, writer = engine_of("right", overlap=True), writer_of()
    run = Run(engine, ref.prompts[:2], greedy_params(SHORT))
    for _ in range(3):
        run.step()
    observed(engine, writer)
    for _ in range(3):
        run.step()
    engine.observe(None)
    assert run.finish() == [c[:SHORT] for c in ref.continuations[:2]]


def test_requests_that_ran_by_two_weights_are_not_recorded_and_later_ones_are(ref, engine_of, writer_of, tmp_path):
    engine, writer = engine_of("none"), writer_of()
    observed(engine, writer)
    run = Run(engine, ref.prompts[:2], greedy_params(SHORT))
    for _ in range(8):
        run.step()
    engine.renew(keep_kv=False)
    assert run.finish() == [c[:SHORT] for c in ref.continuations[:2]]
    Run(engine, ref.prompts[2:4], greedy_params(SHORT)).finish()
    writer.close()
    assert len(recorded(tmp_path)) == 2
    assert writer._used_bytes == 0
