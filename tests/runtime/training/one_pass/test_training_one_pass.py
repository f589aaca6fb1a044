"""Runs that train heads which draft in one pass: killed, continued, split into parts, and served."""

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime.training_world import TAPS, losses, make_corpus, make_verifier, short_run
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.recordings.extract import ExtractConfig, extract
from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.training import drafter
from wingbeat.runtime.training.drafter import train_drafter
from wingbeat.runtime.training.families import FAMILIES
from wingbeat.runtime.verifier.loading.loader import load_model

KINDS = ["dflash", "dspark", "dflash2", "p-eagle"]
SMALL = {"block_size": 5, "num_anchors": 4, "num_layers": 1, "tap_layers": TAPS}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A verifier, a corpus and a recording."""
    root = tmp_path_factory.mktemp("world")
    verifier, corpus = make_verifier(root), make_corpus(root)
    shape = {"sequences": 48, "sequence_length": 24, "tap_layers": TAPS, "device": "cpu", "threads": 1}
    extract(ExtractConfig(model=verifier, output=root / "recording", corpus=corpus, **shape))
    return root


def run(world, output, family, **changes):
    """A short run of a small head from the recording."""
    if family == "eagle3":
        return short_run(world, output, recordings=world / "recording", **changes)
    ranks = {"pair_rank": 8} if family in ("dspark", "dflash2") else {}
    settings = SMALL | ranks | {"recordings": world / "recording", "family": family} | changes
    return short_run(world, output, **settings)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["eagle3", *KINDS])
def test_a_killed_run_continues_with_the_same_losses_and_weights(world, tmp_path, monkeypatch, family):
    uninterrupted, config = (run(world, tmp_path / name, family) for name in ("whole", "killed"))
    train_drafter(uninterrupted)
    kind, calls = FAMILIES[family], []
    inputs = kind.inputs

    def dying(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return inputs(*args)

    monkeypatch.setattr(kind, "inputs", dying)
    with pytest.raises(KeyboardInterrupt):
        train_drafter(config.model_copy(update={"checkpoint_interval_s": 1e-9}))
    monkeypatch.undo()
    if family == "dspark":
        with pytest.raises(ValueError, match="made with another num_anchors"):
            train_drafter(config.model_copy(update={"num_anchors": 3}))
    train_drafter(config)
    assert losses(config) == losses(uninterrupted)
    ours, theirs = (load_file(one.output / "model.safetensors") for one in (config, uninterrupted))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_accumulated_parts_are_the_whole_batch(world, tmp_path, family):
    whole, parts = (run(world, tmp_path / str(n), family, accumulation_steps=n) for n in (1, 4))
    for config in (whole, parts):
        train_drafter(config)
    assert losses(whole) == pytest.approx(losses(parts), rel=1e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", KINDS)
def test_training_continues_another_head(world, tmp_path, monkeypatch, family):
    first = run(world, tmp_path / "first", family, steps=2)
    train_drafter(first)
    started = []

    def watch(config, ranks, task):
        started.append(task.model)
        raise KeyboardInterrupt

    monkeypatch.setattr(drafter, "optimize", watch)
    initial = {"initial_head": tmp_path / "first"}
    with pytest.raises(KeyboardInterrupt):
        train_drafter(run(world, tmp_path / "second", family, **initial))
    head = started[0]
    written = load_file(first.output / "model.safetensors")
    assert torch.equal(head.norm.weight, written["norm.weight"].float())
    assert {n for n, p in head.named_parameters() if not p.requires_grad} <= {"embed_tokens.weight", "lm_head.weight"}
    with pytest.raises(ValueError, match=r"has another .*intermediate_size"):
        train_drafter(run(world, tmp_path / "second", family, intermediate_size=16, **initial))
    other = "dflash" if family != "dflash" else "jetspec"
    with pytest.raises(ValueError, match=f"is not of family='{other}'"):
        train_drafter(run(world, tmp_path / "second", other, **initial))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", KINDS)
def test_a_head_trained_from_the_running_verifier_serves_the_verifiers_own_tokens(world, tmp_path, family):
    """Its drafts are right and wrong, unlike those of random heads."""
    config = run(world, tmp_path / "head", family, recordings=None, steps=40, learning_rate=0.01)
    train_drafter(config)
    assert sum(losses(config)[-5:]) < sum(losses(config)[:5])
    prompts = [list(range(5 + row, 17 + row)) for row in range(6)]
    verifier = FrozenVerifier(config.verifier, TAPS, "cpu", torch.float32)
    greedy = verifier.continue_text(torch.tensor(prompts), 40, torch.zeros(6))[:, 12:].tolist()
    drafted, accepted = served(config, prompts, 0.0, True)
    assert drafted == greedy
    assert accepted > 0
    sampled, _ = served(config, prompts, 1.0, True)
    assert sampled == served(config, prompts, 1.0, False)[0]


def served(config, prompts, temperature, speculates):
    """Tokens of an engine, and how many drafted ones were accepted."""
    shape = SpeculationConfig(3, 2, 6)
    target = TargetDescription.from_checkpoint(config.verifier)
    loaded = load_model(target.path, torch.float32, torch.device("cpu"))
    own = load_drafter(config.output, target, shape) if speculates else None
    engine = build_engine(
        loaded, EngineConfig(max_num_seqs=6, max_model_len=64, speculation=shape), own, InProcessChannel
    )
    for row, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=28, temperature=temperature, seed=row, ignore_eos=True)
        engine.add_request(Request(str(row), tuple(prompt), params))
    tokens, accepted = [[] for _ in prompts], 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] += output.token_ids
            if output.metrics is not None and speculates:
                accepted += sum(output.metrics.num_accepted_tokens_per_pos)
    return tokens, accepted
