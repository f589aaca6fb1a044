"""A training that is killed wherever a file is being written ends with the weights of one that was left alone."""

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.training_world import losses, make_corpus, make_verifier, short_run
from wingbeat.runtime.training.drafter import TrainDrafterConfig, train_drafter
from wingbeat.runtime.training.rollouts import ROLLOUTS_FILE
from wingbeat.runtime.training.state import STATE_FILE, TrainingState

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.few(1)

KILLED = [(ROLLOUTS_FILE, 2), (STATE_FILE, 1), (STATE_FILE, 3)]
"""File at whose writing each process in turn is killed, with it still under its temporary name, and the how many-th."""


def exit_codes(config: TrainDrafterConfig) -> list[int]:
    """Exit codes of processes that train in turn, each killed before the n-th rename of a file.

    The processes are forked from one that has trained nothing: threads of autograd, which training starts, forbid a
    fork.
    """
    code = f"from {__name__} import train_and_be_killed; train_and_be_killed()"
    command = [sys.executable, "-c", code, config.model_dump_json()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def train_and_be_killed() -> None:
    """The fresh process: prints the exit codes of those that it forks."""
    config, codes = TrainDrafterConfig.model_validate_json(sys.argv[1]), []
    for name, count in KILLED:
        process = multiprocessing.get_context("fork").Process(target=_train_until, args=(config, name, count))
        process.start()
        process.join()
        codes.append(process.exitcode)
    print(json.dumps(codes))


def _train_until(config: TrainDrafterConfig, name: str, count: int) -> None:
    replace, left = Path.replace, [count]

    def killing(path, target):
        left[0] -= Path(target).name == name
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(path, target)

    Path.replace = killing
    train_drafter(config)


def digest(config) -> str:
    """SHA-256 of the weights that a run wrote."""
    return hashlib.sha256((config.output / "model.safetensors").read_bytes()).hexdigest()


def test_a_run_that_was_killed_three_times_has_the_weights_of_one_that_was_not(tmp_path, monkeypatch):
    make_verifier(tmp_path), make_corpus(tmp_path)
    whole, cut, other = (
        short_run(tmp_path, tmp_path / name, rollout_rows=128, checkpoint_interval_s=1e-9, seed=seed)
        for name, seed in (("whole", 3), ("cut", 3), ("other", 4))
    )
    train_drafter(whole)
    assert exit_codes(cut) == [-signal.SIGKILL] * len(KILLED)
    taken, record = [], TrainingState.record

    def recorded(state, *args):
        taken.append(state.step)
        return record(state, *args)

    monkeypatch.setattr(TrainingState, "record", recorded)
    train_drafter(cut)
    assert taken == [2, 3, 4, 5], "it goes on behind the second checkpoint"
    assert losses(cut) == losses(whole)
    assert digest(cut) == digest(whole)
    train_drafter(other)
    assert digest(other) != digest(whole), "a seed makes no difference: nothing was compared"
