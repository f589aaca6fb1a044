"""The ranks of one verifier: how they find each other, and what they do together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from wingbeat.runtime.tensor_parallel.group import RankGroup
from wingbeat.runtime.verifier_errors import BackendLost

JOIN_S = 600.0
"""For all ranks to be there: each is a process that starts on its own."""
COLLECTIVE_S = 60.0
"""Within a pass, for a rank that is alive and does not come. One that has died is known at once."""
IDLE = timedelta(days=365)
"""Between two messages of rank 0, which may have nothing to do; its death ends the wait."""
FRAME_BYTES = 16 << 10
"""Of a message's first part, whose size everybody knows; what is longer has a second part."""
_LENGTHS_BYTES = 16
_PROBLEM_BYTES = 512
"""Characters of a line that says what a rank could not do."""


class Ranks:
    """This process as one of them. They are on one node: nothing of theirs is heard outside of it.

    Args:
        rank: 0 leads.

    Raises:
        BackendLost: the others do not come.
    """

    def __init__(self, group: RankGroup, rank: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, group.size, device
        on_gpu = device.type == "cuda"
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(group.store), group.size)
        with self.with_others():
            store.set(f"rank {rank}", "")
            store.wait([f"rank {other}" for other in range(group.size)], timedelta(seconds=JOIN_S))
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=group.size,
                timeout=timedelta(seconds=COLLECTIVE_S),
                device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,
            )
            self._messages = dist.new_group(backend="gloo", timeout=IDLE)

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def wait_for_all(self) -> None:
        """Return once every rank is here, however long that takes one of them."""
        with self.with_others():
            dist.barrier(group=self._messages)

    def sum(self, part: Tensor) -> Tensor:
        """Add up what the ranks have, in place."""
        with self.with_others():
            dist.all_reduce(part)
        return part

    def gather(self, part: Tensor) -> Tensor:
        """The ranks' parts [..., n] side by side: [..., size * n]."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with self.with_others():
            dist.all_gather(parts, part)
        return torch.cat(parts, dim=-1)

    def share(self, numbers: Tensor) -> Tensor:
        """Rank 0's numbers, uint8 [n], on every rank, in place: all that a graph is told of what it runs."""
        with self.with_others():
            dist.broadcast(numbers, 0)
        return numbers

    def agree(self, problem: str | None) -> str | None:
        """Problem of the first rank that has one with what all have tried, in one line.

        Args:
            problem: this rank's own.
        """
        said = torch.zeros(_PROBLEM_BYTES, dtype=torch.uint8)
        text = (problem or "").encode()[:_PROBLEM_BYTES]
        said[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        heard = [torch.empty_like(said) for _ in range(self.size)]
        with self.with_others():
            work = dist.all_gather(heard, said, group=self._messages, async_op=True)
            work.wait(timedelta(seconds=COLLECTIVE_S))
        lines = (bytes(each.tolist()).rstrip(b"\0").decode(errors="ignore") for each in heard)
        return next((f"rank {rank}: {line}" for rank, line in enumerate(lines) if line), None)

    def tell(self, form: bytes, numbers: Tensor) -> None:
        """Rank 0: send the others a message; an empty form ends them.

        Args:
            numbers: uint8 [n] of this rank's device. Nobody waits for a GPU that computes them.
        """
        lengths = torch.tensor([len(form), len(numbers)])
        told = torch.frombuffer(bytearray(lengths.numpy().tobytes() + form), dtype=torch.uint8)
        body = told if numbers.is_cuda else torch.cat([told, numbers])
        frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        frame[: len(body)] = body[:FRAME_BYTES]
        with self.with_others():
            self._send(frame)
            if len(body) > FRAME_BYTES:
                self._send(body[FRAME_BYTES:].contiguous())
            if numbers.is_cuda and len(numbers):
                dist.broadcast(numbers, 0)

    def hear(self) -> tuple[bytes, Tensor]:
        """The others: wait for rank 0's next message."""
        body, on_gpu = torch.empty(FRAME_BYTES, dtype=torch.uint8), self.device.type == "cuda"
        with self.with_others():
            dist.broadcast(body, 0, group=self._messages)
            form_length, num_numbers = body[:_LENGTHS_BYTES].view(torch.int64).tolist()
            begin = _LENGTHS_BYTES + form_length
            end = begin + (0 if on_gpu else num_numbers)
            if end > FRAME_BYTES:
                rest = torch.empty(end - FRAME_BYTES, dtype=torch.uint8)
                dist.broadcast(rest, 0, group=self._messages)
                body = torch.cat([body, rest])
            numbers = body[begin:end].clone()  # at the alignment that tensors ask for
            if on_gpu and num_numbers:
                numbers = torch.empty(num_numbers, dtype=torch.uint8, device=self.device)
                dist.broadcast(numbers, 0)
        return body[_LENGTHS_BYTES:begin].numpy().tobytes(), numbers

    def _send(self, part: Tensor) -> None:
        """Wait only so long for a rank that is alive and does not take it: it was stopped before it listened."""
        dist.broadcast(part, 0, group=self._messages, async_op=True).wait(timedelta(seconds=COLLECTIVE_S))

    def close(self) -> None:
        """Leave the others."""
        dist.destroy_process_group()

    @contextmanager
    def with_others(self) -> Iterator[None]:
        """Context manager in which what fails is the loss of another rank; raises BackendLost."""
        try:
            yield
        except RuntimeError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise BackendLost(f"rank {self.rank} of {self.size} has lost another one: {lines[0]}") from error
