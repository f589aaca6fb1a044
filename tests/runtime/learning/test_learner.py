"""The learner makes a head better on what is served, has it served by measurement alone, and survives being killed."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.drafter_kinds import KINDS, eagle3
from tests.runtime.loaded_kind import Kind
from tests.runtime.models import DEMO_PAIR, TREE, Run, engine_config, greedy_params, new_engine, reference
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.learning.head_versions import FIGURES_FILE, HeadLedger
from wingbeat.runtime.learning.learner import CANDIDATE, Learner
from wingbeat.runtime.learning.settings import LearnerSettings
from wingbeat.runtime.learning.trainer import OnlineTrainer
from wingbeat.runtime.recordings.format import RecordingSpec
from wingbeat.runtime.recordings.live import LiveRecording
from wingbeat.runtime.recordings.ring import RingWriter, RoundRing
from wingbeat.runtime.training.state import STATE_FILE

PLENTY = 10**8
TOKENS = 60


def served_traffic(kind: Kind, root, prompts) -> None:
    """Rounds of requests, as an engine stores them."""
    ref, drafter = kind.ref, kind.drafter(TREE)
    spec = RecordingSpec(
        verifier="v",
        fingerprint=checkpoint_fingerprint(kind.target.path),
        tap_layers=drafter.needs.tap_layers,
        hidden_size=ref.loaded.hidden_size,
        num_layers=len(ref.loaded.layers),
        vocab_size=ref.loaded.vocab_size,
        taps_dtype="float32",
        top_k=0,
        logits_dtype="float32",
        settings={"source": "live"},
    )
    writer = RingWriter(RoundRing(root / "rounds", PLENTY, 1e6), spec)
    engine = new_engine(ref.loaded, engine_config(num_kv_blocks=400), drafter)
    engine.observe(LiveRecording(writer, 1.0, spec.taps_size, torch.float32))
    Run(engine, prompts, greedy_params(TOKENS)).finish()
    engine.model.remove_taps()
    writer.close()


def prompts_of(kind: Kind, count: int) -> list[list[int]]:
    """Of few kinds, so that a head can learn them: a prompt of the reference with one token changed."""
    found = kind.ref.prompts
    return [[number % kind.ref.loaded.vocab_size, *found[number % 2][:4]] for number in range(count)]


def settings_of(kind: Kind, root, **changes) -> LearnerSettings:
    fields = {
        "root": root,
        "verifier": kind.target.path,
        "verifier_name": "v",
        "configured_head": kind.source,
        "max_bytes": PLENTY,
        "expire_s": 1e6,
        "core_share": 1.0,
        "max_load": 1e9,
        "batch_size": 8,
        "sequence_length": 32,
        "learning_rate": 4e-3,
        "warmup_steps": 2,
        "candidate_steps": 40,
        "least_tokens": 100,
        "least_held": 4,
        "refresh_s": 1e-9,
        "checkpoint_s": 1e9,
    }
    return LearnerSettings(**(fields | changes))


FAMILIES = {name: KINDS[name] for name in ("eagle3", "dflash", "peagle") if name in KINDS}


def damaged_demo(folder) -> Kind:
    """The demo pair, whose head has lost much of what it knew."""
    shutil.copytree(DEMO_PAIR / "drafter", folder)
    torch.manual_seed(4)
    weights = load_file(folder / "model.safetensors")
    fc = weights["fc.weight"]
    weights["fc.weight"] = fc + 0.3 * fc.std() * 8 * torch.randn(fc.shape).to(fc.dtype)
    save_file(weights, folder / "model.safetensors")
    return Kind(reference("demo"), TargetDescription.from_checkpoint(DEMO_PAIR / "verifier"), str(folder))


def code_prompts(kind: Kind, count: int) -> list[list[int]]:
    """Pieces of what the demo's verifier writes."""
    texts = kind.ref.sequences
    return [texts[number % len(texts)][number // len(texts) :][:12] for number in range(count)]


def turned(learner: Learner, until, most=600) -> None:
    for _ in range(most):
        learner.turn()
        if until():
            return
    raise AssertionError(f"not within {most} turns: {learner.state}, {learner.ledger.read()}")


@pytest.mark.slow
def test_a_damaged_head_is_trained_measured_and_replaced(tmp_path):
    kind, root = damaged_demo(tmp_path / "head"), tmp_path / "root"
    served_traffic(kind, root, code_prompts(kind, 160))
    learner = Learner(settings_of(kind, root, batch_size=4, learning_rate=2e-3, candidate_steps=30, least_held=20))
    turned(learner, lambda: learner.ledger.read().served)
    ledger = learner.ledger.read()
    assert ledger.served == 1
    assert ledger.version(1).source == "learner"
    assert "better by 2%" in ledger.version(1).reason
    # It loads as drafters load it, in the place of the head that is served.
    drafter = kind.drafter(TREE)
    drafter.take_head(drafter.prepare_head(str(learner.ledger.folder_of(1))))
    assert (root / "learner" / FIGURES_FILE).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_heads_of_every_family_are_trained_and_measured_as_they_are_served(name, tmp_path):
    kind, root = FAMILIES[name](tmp_path / "pair"), tmp_path / "root"
    served_traffic(kind, root, prompts_of(kind, 40))
    learner = Learner(settings_of(kind, root, candidate_steps=3))
    before = learner.trainer.head.fc.weight.clone()
    turned(learner, lambda: learner._test is not None and learner._test.gate.num_requests > 3)
    assert not torch.equal(before, learner.trainer.head.fc.weight)
    drafter = kind.drafter(TREE)
    drafter.take_head(drafter.prepare_head(str(root / "learner" / CANDIDATE)))


def poison(folder, how):
    """Spoil the candidate's files."""
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(9)
    for name, weight in weights.items():
        if weight.is_floating_point():
            weights[name] = torch.full_like(weight, float("nan")) if how == "nan" else torch.randn_like(weight)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["nan", "random"])
def test_a_learner_that_spoils_every_candidate_never_has_one_served(how, tmp_path, monkeypatch):
    kind, root = eagle3(tmp_path / "pair"), tmp_path / "root"
    served_traffic(kind, root, prompts_of(kind, 60))
    learner = Learner(settings_of(kind, root, candidate_steps=2))
    export = learner.trainer.export

    def spoiled(folder):
        export(folder)
        poison(folder, how)

    monkeypatch.setattr(learner.trainer, "export", spoiled)
    turned(learner, lambda: learner.ledger.read().num_tests >= 3, 2000)
    assert learner.ledger.read().served == 0
    assert learner.ledger.read().counts.get("promoted", 0) == 0


@pytest.mark.slow
def test_training_that_diverges_starts_over_and_is_told(tmp_path, monkeypatch):
    kind, root = eagle3(tmp_path / "pair"), tmp_path / "root"
    served_traffic(kind, root, prompts_of(kind, 40))
    learner = Learner(settings_of(kind, root))
    with torch.no_grad():
        learner.trainer.head.fc.weight.fill_(float("nan"))
    learner.turn()
    assert "diverged" in learner.ledger.read().decisions[-1].reason
    assert bool(torch.isfinite(learner.trainer.head.fc.weight).all())


@pytest.mark.slow
def test_a_busy_machine_pauses_the_learner_and_a_share_of_a_core_is_kept(tmp_path):
    kind, root = eagle3(tmp_path / "pair"), tmp_path / "root"
    served_traffic(kind, root, prompts_of(kind, 40))
    now, load = [0.0], [9.0]
    learner = Learner(
        settings_of(kind, root, max_load=4.0, core_share=0.2), load=lambda: load[0], clock=lambda: now[0],
        worked=lambda: now[0],
    )  # fmt: skip
    assert learner.turn() == 1.0
    assert learner.trainer.state.step == 0
    assert learner.state.startswith("paused")
    load[0] = 3.0
    step = learner.trainer.step

    def slow_step():
        now[0] += 0.5
        return step()

    learner.trainer.step = slow_step
    assert learner.turn() == pytest.approx(2.0)  # 0.5 s of work within 2.5 s
    assert learner.trainer.state.step == 1


def test_it_goes_on_from_its_checkpoint_and_from_a_broken_one_anew(tmp_path):
    kind, root = eagle3(tmp_path / "pair"), tmp_path / "root"
    served_traffic(kind, root, prompts_of(kind, 40))
    settings = settings_of(kind, root)
    first = OnlineTrainer(settings)
    first.refresh()
    for _ in range(3):
        first.step()
    first.save()
    second = OnlineTrainer(settings)
    assert second.resume()
    assert second.state.step == 3
    assert torch.equal(second.head.fc.weight, first.head.fc.weight)
    (settings.work / STATE_FILE).write_bytes(b"cut short")
    learner = Learner(settings)
    learner.resume()
    assert learner.trainer.state.step == 0
    assert not (settings.work / STATE_FILE).exists()


@pytest.mark.slow
def test_a_version_that_is_rolled_back_is_what_the_learner_starts_from_again(tmp_path):
    kind, root = eagle3(tmp_path / "pair"), tmp_path / "root"
    served_traffic(kind, root, prompts_of(kind, 40))
    learner = Learner(settings_of(kind, root))
    for _ in range(5):
        learner.turn()
    ledger = HeadLedger(root, kind.source, "v")
    number = ledger.add(lambda into: shutil.copytree(kind.source, into, dirs_exist_ok=True), "learner", "")
    ledger.promote(number, "better")
    learner.turn()
    assert learner.trainer.state.step == 6, "its own promotion changes nothing"
    ledger.roll_back("worse")
    learner.turn()
    assert learner.trainer.state.step <= 1


@pytest.mark.slow
def test_a_learner_that_is_killed_goes_on_and_leaves_one_version_served(tmp_path):
    from wingbeat.deployments.learning.learner_host import MODULE

    kind, root = eagle3(tmp_path / "pair"), tmp_path / "root"
    served_traffic(kind, root, prompts_of(kind, 97))
    settings = settings_of(kind, root, checkpoint_s=0.2, candidate_steps=5)
    ledger = HeadLedger(root, settings.configured_head, settings.verifier_name)
    steps = 0
    for _ in range(4):
        read, write = os.pipe()
        os.write(write, settings.model_dump_json().encode())
        os.close(write)
        process = subprocess.Popen([sys.executable, "-m", MODULE, str(read), str(os.getpid())], pass_fds=[read])
        os.close(read)
        path, deadline = settings.work / STATE_FILE, time.monotonic() + 120
        # The first checkpoint is of what it began with; behind the third there are steps.
        saved = {path.stat().st_mtime_ns} if path.exists() else set()
        enough = len(saved) + 3
        while len(saved) < enough and time.monotonic() < deadline:
            time.sleep(0.05)
            saved |= {path.stat().st_mtime_ns} if path.exists() else set()
        process.send_signal(signal.SIGKILL)
        process.wait()
        trainer = OnlineTrainer(settings)
        assert trainer.resume()
        assert trainer.state.step >= steps
        steps = trainer.state.step
        found = ledger.read()
        assert found.version(found.served).state in ("configured", "promoted")
        assert (ledger.folder_of(found.served) / "config.json").is_file()
    assert steps > 0
    assert not (settings.work / CANDIDATE).is_file()
