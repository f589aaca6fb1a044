"""Process group of one verifier's ranks: rendezvous, messages and collectives."""

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
"""Seconds to wait until all ranks have joined. The limit is long because each rank is a process that is started
separately.
"""
COLLECTIVE_S = 60.0
"""Seconds to wait within a pass for a rank whose process is alive but does not answer. The end of a rank's process is
detected at once.
"""
IDLE = timedelta(days=365)
"""Maximum time between two messages of rank 0. The limit is long because rank 0 may be idle; if the process of rank 0
ends, the wait ends at once.
"""
FRAME_BYTES = 16 << 10
"""Fixed size of a message's first part; a longer message has a second part."""
_LENGTHS_BYTES = 16
_PROBLEM_BYTES = 512
"""Maximum number of bytes of a rank's error line."""


class Ranks:
    """Membership of this process in the group of ranks.

    All ranks are on one node and communicate over the loopback interface.

    Args:
        rank: number of this rank; rank 0 leads.

    Raises:
        BackendLost: the other ranks do not join.
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
        """Waits without a time limit until all ranks have called this method."""
        with self.with_others():
            dist.barrier(group=self._messages)

    def sum(self, part: Tensor) -> Tensor:
        """Adds up the ranks' tensors in place."""
        with self.with_others():
            dist.all_reduce(part)
        return part

    def gather(self, part: Tensor) -> Tensor:
        """Concatenates the ranks' parts [..., n] to [..., size * n]."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with self.with_others():
            dist.all_gather(parts, part)
        return torch.cat(parts, dim=-1)

    def share(self, numbers: Tensor) -> Tensor:
        """Broadcasts rank 0's bytes, uint8 [n], in place; the only kind of message that graphs contain."""
        with self.with_others():
            dist.broadcast(numbers, 0)
        return numbers

    def agree(self, problem: str | None) -> str | None:
        """Exchanges the ranks' problems in an attempt that all ranks made. Returns the problem of the lowest rank that
        has a problem.

        Args:
            problem: this rank's problem; None if it has none.
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
        """On rank 0: sends a message to the other ranks; a message with an empty form ends the other ranks.

        Args:
            numbers: uint8 [n] on this rank's device; if a GPU is still computing these bytes, this method does not wait
                for the GPU.
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
        """On the other ranks: waits for rank 0's next message."""
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
            # a slice may be unaligned, whereas a copy has the alignment that tensors require
            numbers = body[begin:end].clone()
            if on_gpu and num_numbers:
                numbers = torch.empty(num_numbers, dtype=torch.uint8, device=self.device)
                dist.broadcast(numbers, 0)
        return body[_LENGTHS_BYTES:begin].numpy().tobytes(), numbers

    def _send(self, part: Tensor) -> None:
        """Broadcasts a part of a message.

        The time limit detects a rank that is alive but has stopped before it received the part.
        """
        dist.broadcast(part, 0, group=self._messages, async_op=True).wait(timedelta(seconds=COLLECTIVE_S))

    def close(self) -> None:
        """Leaves the process group."""
        dist.destroy_process_group()

    @contextmanager
    def with_others(self) -> Iterator[None]:
        """Context manager that converts RuntimeError, which collectives raise if a rank is lost, to BackendLost."""
        try:
            yield
        except RuntimeError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise BackendLost(f"rank {self.rank} of {self.size} has lost another rank: {lines[0]}") from error
