"""The learner makes a head better on what is served, has it served by measurement alone, and survives being killed."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.drafter_kinds import KINDS, eagle3
from tests.runtime.loaded_kind import Kind
from tests.runtime.models import DEMO_PAIR, TREE, Run, engine_config, greedy_params, new_engine, reference
from wingbeat.runtime.head_swaps.head_swaps import prepare_head, take_head
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.learning.gate import Verdict
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
    # Its thread gives way to all others, which may take a while.
    writer.close(300.0)


def prompts_of(kind: Kind, count: int) -> list[list[int]]:
    """Prompts of two kinds only, so that a head can learn them: a reference prompt with one token changed."""
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
    # The new version loads as drafters load heads, in the place of the served head.
    drafter = kind.drafter(TREE)
    take_head(drafter, prepare_head(drafter, str(learner.ledger.folder_of(1))))
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
    take_head(drafter, prepare_head(drafter, str(root / "learner" / CANDIDATE)))


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


class Taught:
    """A learner of a pair after three steps, which writes a checkpoint at every look."""

    def __init__(self, kind, root):
        self.kind, self.root = kind, root
        self.settings = settings_of(kind, root, checkpoint_s=1e-9)
        self.ledger = HeadLedger(self.root, self.kind.source, "v")
        self.learner = self.started()
        self.turn(3)

    def turn(self, count=1):
        for _ in range(count):
            self.learner.turn()

    def started(self):
        """Another process's learner."""
        learner = Learner(self.settings)
        learner.resume()
        return learner

    def push(self, taken=True):
        """Noise as the version that is served."""
        number = self.ledger.add(self._noise, "operator", "a mistake", serve=True)
        if taken:
            self.ledger.took(number)
        return number

    def _noise(self, into):
        shutil.copytree(self.kind.source, into, dirs_exist_ok=True)
        poison(into, "random")

    def is_at(self, learner, number):
        """Whether a learner has nothing but the weights of a version."""
        weights = load_file(Path(self.ledger.folder_of(number)) / "model.safetensors")["fc.weight"].float()
        return learner.trainer.state.step == 0 and torch.equal(learner.trainer.head.fc.weight.detach().float(), weights)


@pytest.fixture(scope="module")
def traffic(tmp_path_factory):
    """A pair, and a folder with rounds that it served."""
    folder = tmp_path_factory.mktemp("traffic")
    kind = eagle3(folder / "pair")
    served_traffic(kind, folder / "root", prompts_of(kind, 40))
    return kind, folder / "root"


@pytest.fixture
def taught(traffic, tmp_path):
    kind, root = traffic
    return Taught(kind, shutil.copytree(root, tmp_path / "root"))


def test_it_goes_on_from_its_checkpoint_and_from_a_broken_one_anew(taught):
    settings = taught.settings
    first = OnlineTrainer(settings)
    first.refresh()
    for _ in range(3):
        first.step()
    first.change_pace(better=False)
    first.save(5)
    second = OnlineTrainer(settings)
    assert second.resume() == 5
    assert (second.state.step, second.pace) == (3, 0.5)
    assert torch.equal(second.head.fc.weight, first.head.fc.weight)
    with first.averaged(), second.averaged():
        assert torch.equal(second.head.fc.weight, first.head.fc.weight)
    (settings.work / STATE_FILE).write_bytes(b"cut short")
    learner = Learner(settings)
    learner.resume()
    assert learner.trainer.state.step == 0


def test_a_killed_learner_does_not_go_on_from_a_version_that_was_rolled_back(taught):
    taught.push()
    taught.turn(3)
    assert taught.started().trainer.state.step > 0, "it goes on while that version is served"
    taught.ledger.roll_back("measured")
    assert taught.is_at(taught.started(), 0)
    # Its first checkpoint is of the version that it starts from, not of the one before.
    assert taught.started().trainer.state.step == 0


def test_a_learner_starts_from_the_version_that_came_to_be_served_while_it_was_gone(taught):
    number = taught.push()
    assert taught.is_at(taught.started(), number)
    (taught.settings.work / STATE_FILE).unlink()
    assert taught.is_at(taught.started(), number), "also without a checkpoint"


def test_a_roll_back_is_followed_whatever_was_decided_since(taught):
    taught.push()
    taught.turn()
    taught.ledger.roll_back("measured")
    taught.ledger.reject("candidate 1: not better")
    taught.learner._look()
    assert taught.is_at(taught.learner, 0)


def test_a_version_that_is_refused_costs_the_learner_nothing(taught):
    number = taught.push(taken=False)
    taught.turn(2)
    assert taught.started().trainer.state.step >= 4
    taught.ledger.refuse(number, "its numbers are not finite")
    taught.turn()
    assert taught.learner.trainer.state.step == 6


def test_a_version_whose_files_were_damaged_is_refused_by_the_learner(taught):
    number = taught.push()
    (taught.ledger.folder_of(number) / "model.safetensors").write_bytes(b"damaged")
    taught.turn()
    found = taught.ledger.read()
    assert (found.served, found.version(number).state) == (0, "refused")
    assert "checksum" in found.version(number).reason


def test_a_verdict_is_carried_out_over_the_version_it_is_about_and_waits_otherwise(taught, caplog):
    learner = taught.learner
    caplog.set_level("INFO")
    learner._begin_test()
    learner._conclude(Verdict.BETTER, "better")
    assert taught.ledger.read().served == 1
    assert "version 1 of the head is promoted" in caplog.text
    taught.ledger.took(1)
    taught.turn()
    assert learner.trainer.state.step == 4, "its own promotion changes nothing"
    assert taught.started().trainer.state.step == 3
    caplog.clear()
    learner._begin_test()
    pushed = taught.push(taken=False)
    learner._conclude(Verdict.BETTER, "better")
    found = taught.ledger.read()
    assert (found.served, found.versions[-1].state) == (pushed, "waiting")
    assert "is not promoted: it was tested against version" in caplog.text
    assert "is promoted" not in caplog.text


def test_a_test_over_the_texts_of_other_weights_ends(taught):
    learner = taught.learner
    learner._begin_test()
    learner._look()
    assert learner._test is not None
    learner.ring.forget()
    learner._look()
    assert learner._test is None
    learner.turn()
    assert learner.state == "waiting for rounds"


def test_a_verdict_waits_for_drafters_to_take_the_version_that_was_pushed_meanwhile(taught, monkeypatch):
    learner = taught.learner
    learner._begin_test()
    monkeypatch.setattr(learner._test.gate, "decide", lambda: (Verdict.BETTER, "better"))
    pushed = taught.push(taken=False)
    taught.turn()
    assert (taught.ledger.read().served, learner.state) == (pushed, "training")
    taught.ledger.refuse(pushed, "no head")
    taught.turn()
    assert taught.ledger.read().served == pushed + 1


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
        assert trainer.resume() == 0
        assert trainer.state.step >= steps
        steps = trainer.state.step
        found = ledger.read()
        assert found.version(found.served).state in ("configured", "promoted")
        assert (ledger.folder_of(found.served) / "config.json").is_file()
    assert steps > 0
    assert {stat.S_IMODE(path.stat().st_mode) for path in settings.work.iterdir() if path.is_file()} == {0o600}
