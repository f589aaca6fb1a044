"""Tensors of torch's own allocator lent to another process on a GPU.

Run as a script, this file is that process: it reads a pickled loan in hex, and says the sum of its tensor each time it
is asked.
"""

import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.cluster.peers import DEVICE
from wingbeat.cluster.channels.cuda.lent_memory import Borrower, LentTensor, Loan, lend

pytestmark = pytest.mark.gpu
ROWS, COLUMNS = 4096, 512


class Process:
    """Another one that has borrowed `weight`."""

    def __init__(self, loan: Loan) -> None:
        command = [sys.executable, "-m", "tests.cluster.channels.cuda.test_lent_memory_gpu"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._say(pickle.dumps(loan).hex())

    def sum(self) -> float:
        self._say("sum")
        return float(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _say(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


@pytest.fixture
def weights() -> Iterator[list[torch.Tensor]]:
    """Tensors of one allocation: torch cuts a large one that is free."""
    torch.empty(4 * ROWS * COLUMNS, dtype=torch.bfloat16, device=DEVICE)
    yield [torch.full((ROWS, COLUMNS), value, dtype=torch.bfloat16, device=DEVICE) for value in (1.0, 2.0)]
    torch.cuda.empty_cache()


def test_processes_one_after_the_other_read_a_tensor_where_it_lies(weights: list[torch.Tensor]):
    loan = lend({"weight": weights[1], "other": weights[0]}, DEVICE)
    lent = [loan.tensors[name] for name in ("other", "weight")]
    assert all(isinstance(one, LentTensor) for one in lent)
    assert lent[0].handle == lent[1].handle
    assert float(weights[1].double().sum()) == 2.0 * ROWS * COLUMNS  # its kernels take memory where they are loaded
    free = torch.cuda.mem_get_info(DEVICE)[0]
    for value in (2.0, 4.0):
        weights[1].fill_(value)
        torch.cuda.synchronize()
        borrower = Process(loan)
        assert borrower.sum() == value * ROWS * COLUMNS
        borrower.kill()
    weights[1].fill_(1.0)
    torch.cuda.synchronize()
    assert float(weights[1].double().sum()) == ROWS * COLUMNS
    assert torch.cuda.mem_get_info(DEVICE)[0] >= free - weights[1].nbytes // 2, "no killed process keeps a part"


def main() -> None:
    """See the module."""
    weight = Borrower(pickle.loads(bytes.fromhex(sys.stdin.readline())), DEVICE).tensor("weight")
    for _ in sys.stdin:
        print(float(weight.double().sum()), flush=True)


if __name__ == "__main__":
    main()
