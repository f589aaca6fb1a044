"""Tensors that one process lends another on the same GPU: where they lie, who may map them, and how often."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.cluster.channels.cuda.fake_cuda import FakeCuda, FakeMachine
from tests.cluster.peers import DEVICE
from wingbeat.cluster.channels.cuda.lent_memory import Borrower, LentTensor, Loan, lend
from wingbeat.kernels.cuda_driver import CudaError

BORROWS = """
import pickle, sys, torch
from tests.cluster.channels.cuda.fake_cuda import FakeCuda
from wingbeat.cluster.channels.cuda.lent_memory import Borrower
loan = pickle.loads(bytes.fromhex(sys.stdin.readline()))
borrowed = Borrower(loan, torch.device("cuda", 0), FakeCuda()).tensor("b")
for line in sys.stdin:
    print(borrowed.float().sum().item(), flush=True)
"""
"""A process that reports the contents of the tensor b on each request."""


class Lender:
    """A process whose allocator has two tensors in one allocation."""

    def __init__(self, machine: FakeMachine) -> None:
        self.cuda = FakeCuda(machine)
        self.address = self.cuda.allocate(DEVICE, 4096)
        raw = self.cuda.tensor(DEVICE, self.address, 4096)
        self.a = raw[512 : 512 + 24].view(torch.float32).view(2, 3)
        self.b = raw[1024 : 1024 + 24].view(torch.bfloat16).view(4, 3)
        self.a.copy_(torch.arange(6.0).view(2, 3))
        self.b.fill_(0.5)

    def lend(self, **changed: Tensor | str) -> Loan:
        return lend({"a": self.a, "b": self.b} | changed, DEVICE, self.cuda)


@pytest.fixture
def lender() -> Iterator[Lender]:
    made = Lender(FakeMachine(num_gpus=2))
    yield made
    made.cuda.free(DEVICE, made.address)


def test_a_tensor_is_a_handle_of_its_allocation_and_where_it_lies_in_it(lender: Lender):
    loan = pickle.loads(pickle.dumps(lender.lend()))
    borrower = Borrower(loan, DEVICE, FakeCuda(lender.cuda.machine))
    assert borrower.is_beside
    a, b = borrower.tensor("a"), borrower.tensor("b")
    assert torch.equal(a, lender.a)
    assert torch.equal(b, lender.b)
    lender.b[3, 2] = 7.0
    assert b[3, 2] == 7.0, "the same memory, and no copy"
    assert lender.cuda.machine.num_mapped == 1, "of both"


@pytest.mark.slow
def test_a_killed_borrower_and_its_successor_find_the_same_without_a_new_loan(lender: Lender):
    loan = pickle.dumps(lender.lend()).hex()
    for value in (0.5, 2.0, 3.0):
        lender.b.fill_(value)
        borrower = subprocess.Popen(
            [sys.executable, "-c", BORROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        borrower.stdin.write(f"{loan}\nwhat?\n")
        borrower.stdin.flush()
        assert float(borrower.stdout.readline()) == 12 * value
        os.kill(borrower.pid, signal.SIGKILL)
        borrower.communicate()
    assert lender.b[0, 0] == 3.0


def test_a_process_on_another_gpu_or_that_does_not_see_this_one_is_not_beside(lender: Lender):
    loan, machine = lender.lend(), lender.cuda.machine
    assert not Borrower(loan, DEVICE, FakeCuda(machine, visible=(1,))).is_beside
    assert not Borrower(loan, DEVICE, FakeCuda(machine, visible=(1, 0))).is_beside
    assert Borrower(loan, torch.device("cuda", 1), FakeCuda(machine, visible=(1, 0))).is_beside


def test_what_cannot_be_lent_says_why_and_the_rest_is_lent(lender: Lender):
    loan = lender.lend(a=lender.a.t(), b="it is divided", c=torch.zeros(4), d=lender.b)
    reasons = {name: one for name, one in loan.tensors.items() if isinstance(one, str)}
    assert reasons == {
        "a": "it is not contiguous",
        "b": "it is divided",
        "c": "its memory cannot be exported: cuMemGetAddressRange failed: no allocation (CUresult 1)",
    }
    borrower = Borrower(loan, DEVICE, FakeCuda(lender.cuda.machine))
    assert torch.equal(borrower.tensor("d"), lender.b)
    with pytest.raises(CudaError, match=r"^it is divided$"):
        borrower.tensor("b")
    with pytest.raises(CudaError, match="none of that name"):
        borrower.tensor("e")


@pytest.mark.parametrize("fails", ["allocation_of", "export_memory"])
def test_an_allocation_that_has_no_handle_is_a_reason_for_each(lender: Lender, fails: str):
    """As of torch's expandable segments."""
    lender.cuda.fail = fails
    assert all(f"its memory cannot be exported: {fails} failed" in one for one in lender.lend().tensors.values())


def test_what_a_device_may_still_write_is_not_lent(lender: Lender):
    lender.cuda.machine.busy = True
    assert all("has not finished its earlier work" in one for one in lender.lend().tensors.values())
    lender.cuda.machine.busy = False
    assert all(isinstance(one, LentTensor) for one in lender.lend().tensors.values())


def test_what_cannot_be_mapped_is_said(lender: Lender):
    with pytest.raises(CudaError, match="open_memory failed: out of memory"):
        Borrower(lender.lend(), DEVICE, FakeCuda(lender.cuda.machine, fail="open_memory")).tensor("a")
