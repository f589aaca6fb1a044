"""Lending of weights by a verifier to its drafter's process on a shared GPU: conditions and effects."""

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.cluster.channels.cuda.fake_cuda import FILE_PREFIX, FakeCuda, FakeMachine
from tests.needs import needs
from wingbeat.cluster.channels.cuda.lent_memory import LentTensor, Loan, lend
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.gpu_memory.lent_weights import BorrowedWeights, loan_of, may_lend
from wingbeat.deployments.replica.drafters.drafter_actor import DrafterActor, DrafterLost
from wingbeat.deployments.replica.engine.engine_setup import DrafterTerms
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.heads.target import EMBEDDING, LM_HEAD, TargetDescription

DEVICE = torch.device("cuda", 0)
BESIDE = {"num_gpus_per_verifier": 0.7, "num_gpus_per_drafter": 0.3}
LONG_S = 30.0
SHARED = {"num": 1, "max_num_seqs": 512}


@pytest.mark.parametrize(
    ("settings", "lends"),
    [
        (BESIDE, True),
        (BESIDE | {"channel": "cuda_ipc"}, True),
        ({}, False),
        (BESIDE | {"channel": "shm"}, False),
        (BESIDE | {"channel": "remote"}, False),
        ({"num_gpus_per_verifier": 1, "num_gpus_per_drafter": 1}, False),
        (BESIDE | {"drafters": SHARED}, False),
        (BESIDE | {"drafter": "ngram"}, False),
        (BESIDE | {"drafter": "none"}, False),
        (BESIDE | {"drafter_factory": "a.module:function"}, False),
        (BESIDE | {"engine_factory": "a.module:function"}, False),
    ],
    ids=lambda value: ",".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, dict) else "",
)
def test_weights_are_lent_to_a_drafter_of_ones_own_on_the_same_gpu_over_its_memory(settings: dict, lends: bool):
    assert may_lend(AppConfig(**settings)) == lends


class Verifier:
    """A process whose embedding lies in the middle of an allocation, as torch's allocator has it."""

    def __init__(self) -> None:
        self.cuda = FakeCuda(FakeMachine())
        found = TargetDescription.from_checkpoint(demo_pair().verifier).embedding().float()
        self.address = self.cuda.allocate(DEVICE, 4096 + found.nbytes)
        raw = self.cuda.tensor(DEVICE, self.address, 4096 + found.nbytes)
        self.embedding = raw[4096:].view(torch.float32).view(found.shape).copy_(found)

    def loaded(self) -> SimpleNamespace:
        module = SimpleNamespace(weight=self.embedding)
        model = SimpleNamespace(get_input_embeddings=lambda: module, get_output_embeddings=lambda: module)
        return SimpleNamespace(model=model)


@pytest.fixture
def verifier() -> Iterator[Verifier]:
    made = Verifier()
    yield made
    made.cuda.free(DEVICE, made.address)


def test_a_verifier_says_what_it_lends_or_why_not(verifier: Verifier):
    config = AppConfig(**BESIDE, dtype="float32")
    loan = loan_of(config, verifier.loaded(), DEVICE, verifier.cuda)
    assert loan.tensors[EMBEDDING] == loan.tensors[LM_HEAD]
    assert isinstance(loan.tensors[EMBEDDING], LentTensor)
    assert loan_of(AppConfig(), verifier.loaded(), DEVICE, verifier.cuda) is None
    other = loan_of(config.model_copy(update={"dtype": "bfloat16"}), verifier.loaded(), DEVICE, verifier.cuda)
    assert set(other.tensors.values()) == {"the verifier's is float32 and the drafter's bfloat16"}


@needs("ranks")
def test_a_verifier_that_is_divided_lends_nothing(verifier: Verifier):
    config = AppConfig(**BESIDE, dtype="float32").model_copy(update={"tensor_parallel_size": 2})
    loan = loan_of(config, verifier.loaded(), DEVICE, verifier.cuda)
    assert set(loan.tensors.values()) == {"it is divided among 2 ranks"}


def test_a_drafter_waits_where_it_needs_a_weight_until_it_is_told(verifier: Verifier):
    borrowed, found = BorrowedWeights(DEVICE, LONG_S, FakeCuda(verifier.cuda.machine)), []
    loads = threading.Thread(target=lambda: found.append(borrowed(EMBEDDING)))
    loads.start()
    assert not found
    borrowed.tell(lend({EMBEDDING: verifier.embedding}, DEVICE, verifier.cuda))
    borrowed.tell(None)
    loads.join(LONG_S)
    assert torch.equal(found[0], verifier.embedding)
    verifier.embedding[5] = 0.25
    assert torch.equal(found[0], verifier.embedding)


@pytest.mark.parametrize(
    ("loan", "fails", "said"),
    [
        (None, "", None),
        (Loan("GPU-7", {EMBEDDING: "not asked for there"}), "", None),
        (Loan("GPU-0", {EMBEDDING: "it is divided among 2 ranks"}), "", "it is divided among 2 ranks"),
        ("lent", "open_memory", "open_memory failed: out of memory (cudaError 2)"),
    ],
    ids=["nothing lent", "another GPU", "not lent", "not mapped"],
)
def test_where_nothing_can_be_had_a_drafter_loads_its_own_and_one_line_says_why(
    verifier: Verifier, caplog, loan, fails: str, said: str | None
):
    borrowed = BorrowedWeights(DEVICE, LONG_S, FakeCuda(verifier.cuda.machine, fail=fails))
    borrowed.tell(lend({EMBEDDING: verifier.embedding}, DEVICE, verifier.cuda) if loan == "lent" else loan)
    assert borrowed(EMBEDDING) is None
    lines = [record.getMessage() for record in caplog.records]
    assert lines == (
        [f"the drafter loads its own copy of the verifier's {EMBEDDING}: {said}"] if said is not None else []
    )


def test_a_verifier_that_never_says_what_it_lends_is_not_waited_for_for_ever(verifier: Verifier):
    borrowed = BorrowedWeights(DEVICE, 0.0, FakeCuda(verifier.cuda.machine))
    assert borrowed(EMBEDDING) is None
    borrowed.tell(lend({EMBEDDING: verifier.embedding}, DEVICE, verifier.cuda))
    assert borrowed(EMBEDDING) is None, "it has loaded by what it knew"


def mapped(pid: int) -> bool:
    """Whether a process has mapped the fake GPU's memory."""
    return FILE_PREFIX in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.slow
def test_a_killed_drafter_and_its_successor_map_the_same_memory(verifier: Verifier, monkeypatch):
    monkeypatch.setattr(DrafterActor, "serve", "tests.deployments.gpu_memory.lending_drafter:serve")
    loan = lend({EMBEDDING: verifier.embedding}, DEVICE, verifier.cuda)
    terms = pickle.dumps(DrafterTerms(None, loan))
    actor = DrafterActor(AppConfig())
    try:
        needs = pickle.loads(actor.call("needs", terms))
        assert needs.tap_layers
        first = actor.drafter.pid
        assert mapped(first)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(DrafterLost):
            actor.status()
        actor.renew(terms)
        assert pickle.loads(actor.call("needs", terms)) == needs
        second = actor.drafter.pid
        assert mapped(second)
        actor.renew(pickle.dumps(DrafterTerms()))  # of another engine, which lends nothing
        assert pickle.loads(actor.call("needs", pickle.dumps(DrafterTerms()))) == needs
        assert not mapped(actor.drafter.pid)
        assert len({first, second, actor.drafter.pid}) == 3
    finally:
        actor.close()


@pytest.mark.slow
def test_a_drafter_that_is_asked_anything_else_first_loads_its_own(monkeypatch):
    monkeypatch.setattr(DrafterActor, "serve", "tests.deployments.gpu_memory.lending_drafter:serve")
    actor = DrafterActor(AppConfig())
    try:
        assert actor.status().channels == ()
        assert not mapped(actor.drafter.pid)
    finally:
        actor.close()
