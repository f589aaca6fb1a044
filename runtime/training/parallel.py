"""Runs one training run over several processes: the rank of this process, and its rows of a batch.

Uses torchrun's environment variables and torch.distributed; does not depend on models.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Timeout of collectives. It is long because the other processes wait at the next collective while the first process
# generates text and measures acceptance.
_PATIENCE = timedelta(hours=12)


class Part(NamedTuple):
    """A part of a batch, out of `count` equal parts."""

    index: int
    count: int

    def rows(self, batch_size: int) -> range:
        """Row numbers of the part in a batch.

        Raises:
            ValueError: the batch does not split into equal parts; the mean of the parts' mean losses would then differ
                from the batch's mean loss.
        """
        if batch_size % self.count:
            raise ValueError(
                f"batch_size={batch_size} does not split into {self.count} equal parts "
                "(processes times accumulation_steps)"
            )
        size = batch_size // self.count
        return range(self.index * size, (self.index + 1) * size)


class Ranks(NamedTuple):
    """The rank of this process, and the number of processes."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes files, measures and shows progress."""
        return self.rank == 0

    def part(self, round_index: int, num_rounds: int) -> Part:
        """The part of a batch that this process computes in accumulation round `round_index`."""
        return Part(round_index * self.world_size + self.rank, num_rounds * self.world_size)

    def mean(self, value: Tensor) -> Tensor:
        """Mean of a scalar over all processes."""
        if self.world_size > 1:
            dist.all_reduce(value)
            value = value / self.world_size
        return value

    def wait_for_first(self) -> None:
        """Wait until every process has reached this call."""
        if self.world_size > 1:
            dist.barrier()


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the processes of this run that torchrun started; without torchrun the run has a single process.

    Args:
        device: cpu, cuda (the GPU of the process's local rank) or cuda:<index>.

    Raises:
        ValueError: several processes would share the GPU of `device`.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks(0, 1, torch.device(device))
        return
    on_gpu = device != "cpu"
    if on_gpu:
        if ":" in device:
            raise ValueError(f"device={device!r} is one GPU for {world_size} processes; use device='cuda'")
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_PATIENCE)
    try:
        yield Ranks(dist.get_rank(), world_size, torch.device(device))
    finally:
        dist.destroy_process_group()
