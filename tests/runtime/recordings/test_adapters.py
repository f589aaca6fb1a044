"""Recordings say which adapter a sequence ran with, and readers never mix its hidden states with the model's own."""

from collections.abc import Iterator

import pytest
import torch

from tests.runtime.lora_world import LoraWorld, lora_world
from tests.runtime.models import engine_config, greedy_params
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.recordings.format import Record, RecordingError, RecordingSpec
from wingbeat.runtime.recordings.live import LiveRecording
from wingbeat.runtime.recordings.live_writer import LiveWriter
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.recordings.writer import RecordingWriter
from wingbeat.runtime.scheduling.request import Request

TAPS = (1, 3)


def spec(vocab_size: int = 50, hidden_size: int = 4) -> RecordingSpec:
    return RecordingSpec(
        verifier="tiny",
        fingerprint="f0",
        tap_layers=TAPS,
        hidden_size=hidden_size,
        num_layers=4,
        vocab_size=vocab_size,
        taps_dtype="bfloat16",
        top_k=0,
        logits_dtype="float32",
        settings={},
    )


def record(number: int, adapter: str) -> Record:
    token_ids = torch.full((number + 3,), number, dtype=torch.int32)
    taps = torch.full((number + 3, 8), float(number)).bfloat16()
    return Record(token_ids, taps, torch.ones(number + 3, dtype=torch.bool), adapter=adapter)


def tokens(reader: RecordingReader) -> list[int]:
    return [int(found.token_ids[0]) for found in reader.records()]


def test_each_adapters_sequences_are_read_apart(tmp_path):
    writer = RecordingWriter(tmp_path, spec(), 10**9)
    for shard in (("", "a@1", ""), ("b@2", "a@1"), ("", "")):
        for adapter in shard:
            writer.add(record(writer.num_sequences + writer.num_pending, adapter))
        writer.flush()
    assert [shard.adapters for shard in writer.index.shards] == [("a@1",), ("a@1", "b@2"), ()]
    assert tokens(RecordingReader(tmp_path)) == [0, 2, 5, 6]
    assert tokens(RecordingReader(tmp_path, adapter="a@1")) == [1, 4]
    assert {found.adapter for found in RecordingReader(tmp_path, adapter="b@2").records()} == {"b@2"}
    batch = RecordingReader(tmp_path, adapter="a@1").batch(0, 8, 3)
    assert set(batch.token_ids.flatten().tolist()) == {1, 4}


def test_an_adapter_without_sequences_is_named(tmp_path):
    writer = RecordingWriter(tmp_path, spec(), 10**9)
    writer.add(record(0, "a@1"))
    writer.flush()
    with pytest.raises(RecordingError, match="no sequences of b@2"):
        RecordingReader(tmp_path, adapter="b@2")
    with pytest.raises(RecordingError, match="no sequences of the model without adapters"):
        RecordingReader(tmp_path)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(lora_world().loaded, engine_config(), DrafterNeeds(TAPS))
    yield made
    made.model.remove_taps()


def test_live_requests_are_recorded_under_their_adapter(engine, tmp_path):
    world: LoraWorld = lora_world()
    writer = LiveWriter(tmp_path / "engine", tmp_path, spec(97, 64), 10**9)
    engine.observe(LiveRecording(writer, 1.0, 128, torch.bfloat16))
    for index, adapter in enumerate((None, world.adapters[1], world.adapters[2])):
        engine.add_request(Request(f"{index}", tuple(world.prompts[2]), greedy_params(12), variant=adapter))
    while engine.has_unfinished_requests():
        engine.step()
    engine.observe(None)
    writer.close()
    names = ["", *(f"{adapter.name}@{adapter.digest}" for adapter in world.adapters[1:3])]
    for which, name in enumerate(names):
        (found,) = RecordingReader(tmp_path, adapter=name).records()
        text = world.prompts[2] + world.expected[which][2][:12]
        assert found.token_ids.tolist() == text[: len(found.token_ids)]
        assert len(found.token_ids) > len(world.prompts[2])
