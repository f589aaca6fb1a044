"""Training from a recording: the head learns what the verifier at hand would teach, whichever taps a family wants."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from tests.runtime.training_world import (
    NUM_LAYERS,
    TAPS,
    VOCAB,
    losses,
    make_corpus,
    make_verifier,
    metrics,
    short_run,
)
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.choice import parse_drafter
from wingbeat.runtime.heads.eagle1 import Eagle1Head
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.recordings.extract import ExtractConfig, extract
from wingbeat.runtime.recordings.format import RecordingError
from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.scheduling.request import MAX_LOGPROBS
from wingbeat.runtime.training.drafter import train_drafter
from wingbeat.runtime.training.drafter_config import ONE_PASS
from wingbeat.runtime.training.families import FAMILIES
from wingbeat.runtime.training.head_init import initial_eagle3_head
from wingbeat.runtime.training.losses import DraftLoss, TopTarget
from wingbeat.runtime.training.parallel import Part
from wingbeat.runtime.training.sources import RecordedSource
from wingbeat.runtime.training.verifier_weights import weights_of_checkpoint

pytestmark = pytest.mark.few(1)

ALL_TAPS = (*TAPS, NUM_LAYERS)
DFLASH = {"family": "dflash"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A verifier, a corpus, and a recording with every tap."""
    root = tmp_path_factory.mktemp("world")
    verifier, corpus = make_verifier(root), make_corpus(root)
    exact = {"taps_dtype": "float32", "top_k": MAX_LOGPROBS, "device": "cpu", "threads": 1}
    shape = {"sequences": 48, "sequence_length": 24, "tap_layers": ALL_TAPS}
    extract(ExtractConfig(model=verifier, output=root / "recording", corpus=corpus, **shape, **exact))
    return root


@pytest.fixture
def config(world, tmp_path):
    return short_run(world, tmp_path / "out", recordings=world / "recording", steps=30)


def source(config, tap_layers=TAPS) -> RecordedSource:
    return RecordedSource(config, config.recordings, Path(config.verifier), tap_layers, torch.device("cpu"))


def load(config):
    return load_eagle_head(config.output, TargetDescription.from_checkpoint(config.verifier))


@pytest.mark.parametrize("tap_layers", [TAPS, (NUM_LAYERS,), (1, NUM_LAYERS), ALL_TAPS], ids=str)
def test_a_recording_teaches_what_the_verifier_itself_would(config, tap_layers):
    # As long as the recorded sequences, so that windows begin where the verifier began to read.
    config = config.model_copy(update={"sequence_length": 24})
    tokens, taps, target, mask = source(config, tap_layers).inputs(3, Part(0, 1)).tensors
    seen = FrozenVerifier(config.verifier, tap_layers, "cpu", torch.float32).observe(tokens)
    torch.testing.assert_close(taps, seen.taps, rtol=1e-4, atol=1e-4)
    assert mask.all()
    weights = weights_of_checkpoint(TargetDescription.from_checkpoint(config.verifier))
    head = initial_eagle3_head(
        weights, tap_layers, torch.arange(VOCAB), draft_vocab_size=200, intermediate_size=None, seed=0
    )
    loss = DraftLoss(head, 3, 0.9)
    likeliest = seen.logits.softmax(-1).topk(MAX_LOGPROBS)
    wanted = loss(tokens, seen.taps, TopTarget(likeliest.indices, likeliest.values))
    torch.testing.assert_close(loss(tokens, taps, target, mask), wanted)


def test_parts_of_a_batch_are_the_batch(config):
    def tokens(step, part):
        return source(config).inputs(step, part).tensors[0]

    whole = tokens(5, Part(0, 1))
    assert torch.equal(torch.cat([tokens(5, Part(index, 2)) for index in range(2)]), whole)
    assert not torch.equal(tokens(6, Part(0, 1)), whole)


def test_without_logits_the_next_tokens_are_learnt(config, world, tmp_path):
    exact = {"sequence_length": 24, "tap_layers": TAPS, "top_k": 0, "device": "cpu", "threads": 1}
    plain = tmp_path / "plain"
    extract(ExtractConfig(model=world / "verifier", output=plain, corpus=world / "corpus", sequences=8, **exact))
    tokens, _, target, _ = source(config.model_copy(update={"recordings": plain})).inputs(0, Part(0, 1)).tensors
    assert isinstance(target, TopTarget)
    assert torch.equal(target.token_ids[:, :-1, 0], tokens[:, 1:])
    assert target.probabilities.eq(1).all()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_from_a_recording_and_is_measured_by_the_engine(config, family):
    config = config.model_copy(update={"family": family, "validation_prompts": 4})
    train_drafter(config, InProcessChannel)
    assert sum(losses(config)[-5:]) < sum(losses(config)[:5])
    [measured] = metrics(config)["validations"]
    assert measured["step"] == 30
    assert metrics(config)["acceptance"]["prompts"] == RecordingReader(config.recordings, held_out=True).num_sequences
    if family == "mtp":
        assert parse_drafter("auto", config.output).kind == family
        return
    files = {path.name for path in config.output.iterdir()}
    assert files == {"config.json", "model.safetensors", "metrics.json"}
    if family in ONE_PASS:
        assert first_result("family_of_head", config.output) == family
        return
    head = load(config)
    assert isinstance(head, Eagle1Head) == (family == "eagle1")
    assert head.convention.norm_output == (family == "eagle3.1")
    assert head.tap_layers == ((NUM_LAYERS,) if family == "eagle1" else TAPS)


@pytest.mark.slow
def test_both_layouts_hold_the_same_head(config, tmp_path):
    other = config.model_copy(update={"output": tmp_path / "other", "layout": "speculators"})
    train_drafter(config)
    train_drafter(other)
    assert "speculators_model_type" in (other.output / "config.json").read_text()
    ours, theirs = load(config).state_dict(), load(other).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


def test_a_recording_of_another_verifier_is_refused(config, tmp_path):
    (tmp_path / "other").mkdir()
    other = make_verifier(tmp_path / "other")
    weights = {name: tensor + 1 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecordingError, match="not of this one"):
        train_drafter(config.model_copy(update={"verifier": str(other)}))


def test_a_tap_that_was_not_recorded_is_refused(config, tmp_path, world):
    few = tmp_path / "few"
    settings = {"sequence_length": 24, "tap_layers": (0, 2), "device": "cpu", "threads": 1}
    extract(ExtractConfig(model=world / "verifier", output=few, corpus=world / "corpus", sequences=4, **settings))
    with pytest.raises(ValueError, match=r"the recording has taps \(0, 2\) and lacks 1, 3 of tap_layers=\(0, 1, 3\)"):
        source(config.model_copy(update={"recordings": few}), (0, 1, 3))
    with pytest.raises(ValueError, match=r"lacks 3 of tap_layers=\(3,\)"):
        train_drafter(config.model_copy(update={"recordings": few, "family": "eagle1"}))
    assert RecordingReader(few).spec.tap_layers == (0, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recordings": "/nowhere"}, "recordings='/nowhere' is not a folder"),
        ({"family": "eagle1", "tap_layers": (1,)}, "eagle1 has one tap"),
        ({"family": "eagle2"}, "eagle3.1"),
        ({"family": "eagle1", "layout": "specforge"}, "layout='specforge' does not hold heads of family='eagle1'"),
        ({"tap_layers": (2, 1)}, "not ascending"),
        ({"feature_weight": 1.0}, "feature_weight='1.0': family='eagle3' does not have this setting"),
        ({"block_size": 4}, "block_size='4': family='eagle3' does not have this setting"),
        ({"num_layers": 3}, "num_layers='3': family='eagle3' does not have this setting"),
        (DFLASH | {"pair_rank": 8}, "pair_rank='8': family='dflash' does not have this setting"),
        (DFLASH | {"markov_kind": "rnn"}, "markov_kind='rnn': family='dflash' does not have this setting"),
        (DFLASH | {"ttt_steps": 3}, "ttt_steps='3': family='dflash' does not have this setting"),
        (DFLASH | {"layout": "specforge"}, "layout='specforge': family='dflash' does not have this setting"),
        (DFLASH | {"block_size": 15}, "sequence_length=16 is too short for a chain of block_size=15"),
        (DFLASH | {"family": "dflash2", "pair_rank": 0}, "pair_rank=0: family='dflash2' without it is family='dflash'"),
        (DFLASH | {"family": "dspark", "pair_rank": 0, "markov_kind": "rnn"}, "'rnn' needs a pair_rank above 0"),
        (DFLASH | {"family": "dflash3"}, "dflash3"),
    ],
)
def test_settings_are_refused_by_field(world, tmp_path, fields, message):
    with pytest.raises(ValidationError, match=message):
        short_run(world, tmp_path / "out", **fields)
