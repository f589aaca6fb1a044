"""Weights that lie in a trainer's GPU memory: the engine maps them, writes them, and unmaps them."""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cluster.channels.cuda.fake_cuda import FakeCuda, FakeMachine
from tests.cluster.peers import DEVICE
from tests.deployments.rollouts.held_engine import NEW, Held
from wingbeat.deployments.rollouts import weight_transfer
from wingbeat.deployments.rollouts.ipc.handles import ipc_handles, opened

NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
ROOT = Path(__file__).parents[4]
TRAINER = """
import json, sys
from safetensors.torch import load_file
from tests.cluster.channels.cuda.fake_cuda import FakeCuda
from tests.deployments.rollouts.ipc.test_ipc_handles import placed
from wingbeat.deployments.rollouts.ipc.handles import ipc_handles
cuda = FakeCuda()
address, tensors = placed(load_file(sys.argv[1]), cuda)
print(json.dumps(ipc_handles(tensors, cuda)), flush=True)
sys.stdin.readline()
cuda.free(None, address)
"""
"""A trainer in a process of its own, which keeps its weights until a line comes."""


class Placed(torch.Tensor):
    """A tensor of the host's that claims to be on the fake card."""

    device = DEVICE


def placed(tensors: dict[str, torch.Tensor], cuda: FakeCuda) -> tuple[int, dict[str, torch.Tensor]]:
    """Copy tensors to one allocation of the card; every matrix is stored transposed there."""
    size = sum(tensor.nbytes + 16 for tensor in tensors.values())
    address, begin, found = cuda.allocate(DEVICE, size), 0, {}
    raw = cuda.tensor(DEVICE, address, size)
    for name, tensor in tensors.items():
        there = raw[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape[::-1])
        found[name] = (there.t() if there.dim() > 1 else there).copy_(tensor).as_subclass(Placed)
        begin += -(-tensor.nbytes // 16) * 16
    return address, found


class Trainer:
    """A trainer on the engine's card."""

    def __init__(self, machine: FakeMachine) -> None:
        self.cuda = FakeCuda(machine)
        self.address, self.tensors = placed(NEW, self.cuda)

    def info(self) -> dict[str, Any]:
        """As it arrives over HTTP."""
        return json.loads(json.dumps(ipc_handles(self.tensors, self.cuda)))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """The card on which engines are."""
    made = FakeMachine()

    def first_result(name: str, info: dict[str, Any], device: torch.device, check: Any) -> Any:
        return opened(info, DEVICE, check, FakeCuda(made)) if "ipc_handles" in info else None

    monkeypatch.setattr(weight_transfer, "first_result", first_result)
    return made


@pytest.fixture
def trainer(machine: FakeMachine) -> Iterator[Trainer]:
    made = Trainer(machine)
    yield made
    made.cuda.free(DEVICE, made.address)
    assert machine.is_clean()


def by_new() -> list[list[int]]:
    held = Held()
    held.do("start_update")
    held.engine._update.write(NEW.items)
    held.do("finish_update")
    held.add()
    return held.run().texts()


def test_an_engine_copies_what_a_trainer_shares_and_keeps_nothing_mapped(machine: FakeMachine, trainer: Trainer):
    held = Held()
    held.do("start_update")
    held.do("update_weights", trainer.info())
    assert machine.num_mapped == 0
    assert held.do("finish_update").num_tensors == len(NEW)
    for tensor in trainer.tensors.values():
        tensor.zero_()  # the engine has copies
    held.add()
    assert held.run().texts() == by_new()


@pytest.mark.slow
def test_a_trainer_is_another_process(machine: FakeMachine, tmp_path: Path):
    save_file(NEW, tmp_path / "new.safetensors")
    command = [sys.executable, "-c", TRAINER, str(tmp_path / "new.safetensors")]
    trainer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    held = Held()
    held.do("start_update")
    held.do("update_weights", json.loads(trainer.stdout.readline()))
    trainer.communicate("\n")
    assert (trainer.returncode, machine.num_mapped) == (0, 0)
    held.do("finish_update")
    held.add()
    assert held.run().texts() == by_new()


WRONG = {
    "a list": (lambda info: {"ipc_handles": [info]}, "update_info.ipc_handles must be an object"),
    "another field": (lambda info: info | {"names": []}, "update_info.names is given with ipc_handles"),
    "vLLM's pickle": (lambda info: {"ipc_handles_pickled": "gASV"}, "update_info.ipc_handles_pickled is not supported"),
    "no tensor": (lambda info: {"ipc_handles": {}}, "no tensors are given"),
    "a name": (lambda info: changed(info, NORM, "x"), "x is no tensor"),
    "a shape": (lambda info: changed(info, UP, shape=[64, 96]), f"{UP} has shape [64, 96], expected [96, 64]"),
    "a negative size": (lambda info: changed(info, NORM, shape=[-1]), f"update_info.ipc_handles.{NORM}.shape.0 input"),
    "a dtype": (lambda info: changed(info, NORM, dtype="int8"), f"update_info.ipc_handles.{NORM}.dtype input should"),
    "a field": (lambda info: changed(info, NORM, at=3), f"update_info.ipc_handles.{NORM}.at extra inputs"),
    "no object": (lambda info: {"ipc_handles": {NORM: 3}}, f"update_info.ipc_handles.{NORM} input should be"),
    "text as a number": (lambda info: changed(info, NORM, offset="0"), f"update_info.ipc_handles.{NORM}.offset input"),
    "another card": (
        lambda info: changed(info, NORM, device="GPU-1"),
        f"update_info.ipc_handles.{NORM}.device is GPU-1: the engine is on GPU-0",
    ),
    "strides": (
        lambda info: changed(info, NORM, stride=[1, 1]),
        f"update_info.ipc_handles.{NORM}.stride has 2 numbers: shape has 1",
    ),
    "an odd offset": (
        lambda info: changed(info, NORM, offset=2),
        f"update_info.ipc_handles.{NORM}.offset is 2: must be a multiple of 4",
    ),
    "beyond its memory": (
        lambda info: changed(info, NORM, offset=1 << 40),
        f"update_info.ipc_handles.{NORM}.size is",
    ),
    "a stride beyond its memory": (
        lambda info: changed(info, NORM, stride=[1 << 30]),
        f"update_info.ipc_handles.{NORM}.size is",
    ),
    "a size": (
        lambda info: changed(info, NORM, size=1 << 40),
        f"update_info.ipc_handles.{NORM}.size is {1 << 40}: the allocation of its handle has",
    ),
    "a truncated handle": (
        lambda info: changed(info, NORM, handle=info["ipc_handles"][NORM]["handle"][:-8]),
        f"update_info.ipc_handles.{NORM}.handle has 60 bytes, expected 64",
    ),
    "no base64": (lambda info: changed(info, NORM, handle="*"), f"update_info.ipc_handles.{NORM}.handle must be base"),
    "a handle of nothing": (
        lambda info: changed(info, NORM, handle=base64.b64encode(b"x" * 64).decode()),
        f"update_info.ipc_handles.{NORM}.handle cannot be opened: cudaIpcOpenMemHandle failed",
    ),
}
"""Changes of what a trainer sends, and the beginning of the answer."""


def changed(info: dict[str, Any], name: str, rename: str | None = None, **fields: Any) -> dict[str, Any]:
    entries = dict(info["ipc_handles"])
    return {"ipc_handles": entries | {rename or name: entries.pop(name) | fields}}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named_before_a_byte_is_written(machine: FakeMachine, trainer: Trainer, what: str):
    spoil, reason = WRONG[what]
    held = Held()
    if what == "vLLM's pickle":
        held.engine._transfer._broadcasts = object()
    before = held.do("weight_checksums")
    held.do("start_update")
    assert held.tell("update_weights", spoil(trainer.info())).refused.startswith(reason)
    assert (machine.num_mapped, held.do("num_written").num_tensors) == (0, 0)
    held.do("abandon_update")
    assert held.do("weight_checksums") == before


def test_values_are_checked_before_the_first_is_written(machine: FakeMachine, trainer: Trainer):
    held = Held()
    before = held.do("weight_checksums")
    trainer.tensors["lm_head.weight"][-1, -1] = torch.nan
    held.do("start_update")
    assert held.tell("update_weights", trainer.info()).refused == "lm_head.weight holds NaN as float32"
    assert (machine.num_mapped, held.do("num_written").num_tensors) == (0, 0)
    held.do("abandon_update")
    assert held.do("weight_checksums") == before


def test_copies_that_do_not_end_end_the_update(machine: FakeMachine, trainer: Trainer):
    held, info = Held(), trainer.info()
    held.do("start_update")
    machine.busy = True
    told = held.tell("update_weights", info)
    machine.busy = False
    assert told.conflict == "cuda:0 has not copied the tensors within 60 s"
    assert not told.serves


@pytest.mark.parametrize("fails", ["allocation_of", "export_memory"])
def test_a_tensor_that_cannot_be_shared_is_named(trainer: Trainer, fails: str):
    """As of torch's expandable segments."""
    trainer.cuda.fail = fails
    with pytest.raises(ValueError, match=f"cannot be shared: {fails} failed"):
        ipc_handles({NORM: trainer.tensors[NORM]}, trainer.cuda)


def test_a_trainer_waits_for_its_own_writes(machine: FakeMachine, trainer: Trainer):
    machine.busy = True
    with pytest.raises(ValueError, match="has not finished its earlier work"):
        trainer.info()


def test_an_engine_on_a_cpu_says_so():
    held = Held()
    held.do("start_update")
    told = held.tell("update_weights", {"ipc_handles": {}})
    assert told.refused == "update_info.ipc_handles cannot be opened: the engine is on the CPU"
