"""Copies of the verifier's embedding and output matrix in a drafter hold what the last update has written."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.runtime.drafter_kinds import eagle1
from tests.runtime.loaded_kind import Kind
from tests.runtime.models import TREE, Run, engine_config, greedy_params, random_model, random_prompts
from tests.runtime.rollouts.test_served_weights import moved, values_of
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.head_swaps.head_swaps import HeadSwaps, check_alike, tensors_of
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.target import EMBEDDING, LM_HEAD, TargetDescription
from wingbeat.runtime.inner_drafter import InnerDrafter, attach
from wingbeat.runtime.rollouts import rows_follower
from wingbeat.runtime.rollouts.current_rows import CurrentRows, Place
from wingbeat.runtime.rollouts.rows_follower import RowsFollower, follow_rows
from wingbeat.runtime.rollouts.served_weights import ServedWeights
from wingbeat.runtime.rollouts.update import WeightUpdate
from wingbeat.runtime.verifier.loading.loader import prepare_model

NEW = moved(random_model("llama"))


def bare(folder: Path) -> Kind:
    """A kind whose head has neither embedding nor output matrix."""
    kind = eagle1(folder)
    file = Path(kind.source, "model.safetensors")
    own = {name: one for name, one in load_file(file).items() if not name.endswith((EMBEDDING, LM_HEAD))}
    save_file(own, file, {"format": "pt"})
    return kind


def changed(source: str, folder: Path) -> str:
    """A copy of a head with other weights."""
    shutil.copytree(source, folder)
    held = load_file(folder / "model.safetensors")
    save_file({name: one * 1.1 for name, one in held.items()}, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


class World:
    """A verifier whose weights change, and its drafter."""

    def __init__(self, folder: Path) -> None:
        self.kind = bare(folder)
        self.worker = DraftWorker(load_drafter(self.kind.source, self.kind.target, TREE))
        self.loaded = prepare_model(random_model("llama"), "llama")
        self.rows = CurrentRows()
        self.loaded.add(self.rows)
        self.update = WeightUpdate(ServedWeights(self.loaded), keeps_journal=True)
        self.follower = RowsFollower(self.rows.place, self.worker)

    @property
    def head(self) -> dict[str, Tensor]:
        """Tensors of the head that drafts."""
        return tensors_of(self.worker.drafter.head)

    def write(self, values: dict[str, Tensor]) -> None:
        self.update.start()
        self.update.write(values.items)
        self.update.finish()

    def look(self) -> bool:
        found = self.follower.look()
        self.worker.run_once()  # between two rounds
        return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "world")


def loaded_anew(source: str, model, folder: Path) -> dict[str, Tensor]:
    """The head of a drafter that is loaded beside a checkpoint of the new weights."""
    model.save_pretrained(folder)
    return tensors_of(load_drafter(source, TargetDescription.from_checkpoint(folder), TREE).head)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_head_after_an_update_is_the_one_that_a_checkpoint_of_the_new_weights_gives(world: World, tmp_path: Path):
    before = world.head
    assert not world.look()
    world.write(values_of(NEW))
    assert same(world.head, before)
    assert world.look()
    after = loaded_anew(world.kind.source, NEW, tmp_path / "new")
    assert same(world.head, after)
    assert not same(before, after)
    assert not world.look()


def test_a_state_that_cannot_be_read_leaves_the_drafter_and_is_read_again(world: World, monkeypatch, caplog):
    before = world.head
    world.write(values_of(NEW))
    with monkeypatch.context() as torn:
        torn.setattr("wingbeat.runtime.rollouts.rows_follower.os.pread", lambda *given: b"")
        assert not world.look()
    assert "the drafter keeps older rows of the verifier: error: unpack" in caplog.text
    assert same(world.head, before)
    assert world.look()


def test_an_update_of_one_matrix_keeps_the_other_of_the_update_before(world: World, tmp_path: Path):
    world.write(values_of(NEW))
    both = moved(NEW, seed=6)
    with torch.no_grad():
        both.lm_head.weight.copy_(NEW.lm_head.weight)
    world.write({"model.embed_tokens.weight": values_of(both)["model.embed_tokens.weight"]})
    assert world.look()
    assert same(world.head, loaded_anew(world.kind.source, both, tmp_path / "both"))


def test_a_drafter_that_starts_anew_has_the_rows_at_once(world: World):
    world.write(values_of(NEW))
    world.look()
    target = TargetDescription.from_checkpoint(world.kind.target.path)
    worker = DraftWorker(load_drafter(world.kind.source, target, TREE))
    follow_rows(world.rows.place, worker)
    worker.run_once()
    assert same(tensors_of(worker.drafter.head), world.head)


def test_a_drafter_in_the_engine_s_process_has_the_rows_too(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows_follower, "LOOK_S", 0.01)
    target = TargetDescription.from_checkpoint(world.kind.target.path)
    worker = DraftWorker(load_drafter(world.kind.source, target, TREE))
    InnerDrafter(None, "cpu", lambda lender: worker).needs(None, world.loaded)
    world.write(values_of(NEW))
    world.look()
    deadline = time.monotonic() + 20
    while not same(tensors_of(worker.drafter.head), world.head) and time.monotonic() < deadline:
        time.sleep(0.01)
        worker.run_once()
    assert same(tensors_of(worker.drafter.head), world.head)


def test_an_update_that_a_journal_takes_back_leaves_the_old_rows(world: World):
    before = world.head
    world.update.start()
    world.update.write(values_of(NEW).items)
    world.update.abandon()
    world.look()
    assert same(world.head, before)


@pytest.mark.parametrize("order", ["offered first", "prepared first", "taken first"])
def test_another_head_has_the_new_rows_whenever_it_comes(world: World, tmp_path: Path, order: str):
    other = changed(world.kind.source, tmp_path / "other")
    swaps = HeadSwaps.of(world.worker)
    head = swaps.prepare(other)
    if order != "prepared first":
        swaps.offer(7, head)
    if order == "taken first":
        assert swaps.take()
    world.write(values_of(NEW))
    assert world.look()
    if order == "prepared first":
        swaps.offer(7, head)
        assert swaps.take()
    assert swaps.version == 7
    assert same(world.head, loaded_anew(other, NEW, tmp_path / "new"))


def test_drafts_go_on_over_an_update(world: World):
    config = engine_config(TREE)
    engine = Engine(world.loaded, config, world.worker.drafter.needs)
    attach(engine, world.worker, InProcessChannel)
    world.write(values_of(NEW))
    world.follower.look()
    prompts = random_prompts((5, 17))
    fresh = Engine(prepare_model(moved(random_model("llama")), "new"), config)
    expected = Run(fresh, prompts, greedy_params(20)).finish()
    assert Run(engine, prompts, greedy_params(20)).finish() == expected
    assert engine.speculation.num_drafts
    assert engine.drafter_state == "attached"


def test_a_lent_weight_stays_the_verifier_s_own_in_every_head(tmp_path: Path):
    """A swap copies tensors that differ, and would write the file's numbers into the verifier."""
    kind = bare(tmp_path)
    lent = {EMBEDDING: random_model("llama").get_input_embeddings().weight.detach(), LM_HEAD: None}
    target = TargetDescription.from_checkpoint(kind.target.path, lent.get)
    first = load_eagle_head(kind.source, target)
    lent[EMBEDDING].mul_(2)  # an update of the verifier
    target.newer[EMBEDDING] = torch.zeros_like(lent[EMBEDDING])
    later = load_eagle_head(kind.source, target)
    address = lent[EMBEDDING].data_ptr()
    assert first.embed_tokens.weight.data_ptr() == later.embed_tokens.weight.data_ptr() == address
    assert target.copied == {LM_HEAD}
    lent[EMBEDDING].fill_(torch.nan)  # a verifier that sleeps has no such memory, which a check would read
    check_alike(later, first, kind.source)


def test_a_place_that_is_not_the_verifier_s_is_said(world: World, caplog):
    place, file = world.rows.place, os.memfd_create("other")
    os.pwrite(file, bytes(32), 0)
    for other in (place._replace(mark=b"another machine "), Place(f"/proc/{os.getpid()}/fd/{file}", place.mark)):
        caplog.clear()
        follow_rows(other, world.worker)
        assert "keeps the checkpoint's embedding and output matrix" in caplog.text
    follow_rows(Place("/proc/0/fd/1", place.mark), world.worker)
    os.close(file)


def test_rows_that_cannot_be_used_leave_the_drafter_as_it_is(world: World, caplog):
    before = world.head
    shutil.move(world.kind.source, f"{world.kind.source}-gone")
    world.write(values_of(NEW))
    assert not world.look()
    assert "the drafter keeps older rows of the verifier" in caplog.text
    assert same(world.head, before)
    assert not world.look()


def test_drafters_without_such_a_head_are_left_alone():
    assert not HeadSwaps.of(DraftWorker(ScriptedDrafter([], right_tree, 2))).renew({EMBEDDING: torch.ones(2, 2)})


def test_nothing_is_kept_where_no_drafter_asks(tmp_path: Path):
    loaded, rows = prepare_model(random_model("llama"), "llama"), CurrentRows()
    loaded.add(rows)
    served = ServedWeights(loaded)
    served.write("lm_head.weight", served.read("lm_head.weight"))
    served.finish()
    assert (rows.num_bytes, rows._written) == (0, {})
