"""Training in processes of its own: killed and continued, and shared by torchrun's processes."""

import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime.training_world import TAPS, losses, make_corpus, make_verifier, metrics, short_run
from wingbeat.runtime.recordings.extract import ExtractConfig, extract
from wingbeat.runtime.training import parallel
from wingbeat.runtime.training.drafter import train_drafter
from wingbeat.runtime.training.parallel import Part, joined
from wingbeat.runtime.training.state import STATE_FILE

WINGBEAT = [sys.executable, "-c", "from wingbeat.deployments.cli.main import main; main()"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    verifier, corpus = make_verifier(root), make_corpus(root)
    settings = {"sequences": 48, "sequence_length": 24, "tap_layers": TAPS, "top_k": 16, "device": "cpu", "threads": 1}
    extract(ExtractConfig(model=verifier, output=root / "recording", corpus=corpus, **settings))
    return root


def options(config) -> list[str]:
    """The command line of a run, with every setting that is not a default."""
    given = config.model_dump(mode="json", exclude_unset=True)
    return ["train", "drafter"] + [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


@pytest.mark.slow
def test_a_run_killed_by_sigkill_continues_with_the_same_losses(world, tmp_path):
    settings = {"recordings": world / "recording", "steps": 150, "accumulation_steps": 2}
    whole = short_run(world, tmp_path / "whole", **settings)
    killed = short_run(world, tmp_path / "killed", **settings, checkpoint_interval_s=1e-9)
    process = subprocess.Popen([*WINGBEAT, *options(killed)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    state = killed.output / STATE_FILE
    # Each process has its own idea of the same work: the uninterrupted run uses the time the other takes to start.
    train_drafter(whole)
    deadline = time.monotonic() + 120
    while process.poll() is None and not state.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = torch.load(state, weights_only=True)["step"]
    assert 0 < done < 150
    train_drafter(killed)
    assert losses(killed) == losses(whole)
    assert len(losses(killed)) == 150
    result, expected = (load_file(run.output / "model.safetensors") for run in (killed, whole))
    assert all(torch.equal(result[name], tensor) for name, tensor in expected.items())
    assert not state.exists()


@pytest.mark.slow
def test_processes_share_a_batch_and_make_the_weights_of_one(world, tmp_path):
    alone = short_run(world, tmp_path / "alone")
    shared = short_run(world, tmp_path / "shared", accumulation_steps=2)
    train_drafter(alone)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    ran = subprocess.run([*torchrun, *WINGBEAT, *options(shared)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-4)
    assert metrics(shared)["num_tokens"] == metrics(alone)["num_tokens"]
    result, expected = (load_file(run.output / "model.safetensors") for run in (shared, alone))
    for name, tensor in expected.items():
        torch.testing.assert_close(result[name], tensor, rtol=2e-2, atol=1e-3)


def test_one_gpu_for_several_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="device='cuda:0' is one GPU for 2 processes"), joined("cuda:0"):
        pass
    assert not parallel.dist.is_initialized()


def test_parts_are_equal_and_make_the_batch():
    parts = [Part(index, 4).rows(8) for index in range(4)]
    assert [row for rows in parts for row in rows] == list(range(8))
    with pytest.raises(ValueError, match="batch_size=6 does not split into 4 equal parts"):
        Part(0, 4).rows(6)
