"""A stand-in for CUDA graphs with collectives in them: captures run none, replays run those of all ranks together."""

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, Work

from tests.runtime.recorded_graphs import Call, Recorder, RecordingDevice
from wingbeat.runtime.fused.layers import LayerOps

OPS = LayerOps()
"""Steps of fused layers on the CPU: those of CUDA are Triton's."""


class RankRecorder(Recorder):
    """Notes collectives without running them, as NCCL does in a capture: their outputs are then no numbers.

    Zeros stand for what another rank would send, which are indices of something on any rank.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "c10d":
            return super().__torch_dispatch__(function, types, args, kwargs)
        self.calls.append(Call(partial(finished, function), args, kwargs or {}, []))
        if function._schema.name == "c10d::broadcast_" and dist.get_rank():
            [part.zero_() for part in args[0]]
        return args[0], FakeWork().boxed()


def finished(function: Callable, *args: Any, **kwargs: Any) -> None:
    """Run a collective to its end."""
    Work.unbox(function(*args, **kwargs)[-1]).wait()


class RecordedRank(RecordingDevice):
    """A rank's graph device.

    Args:
        fails: which capture is spoiled here, by a call that a capture forbids; 0 for none.
        dies: in which one this process ends.
    """

    recorder = RankRecorder

    def __init__(self, fails: int = 0, dies: int = 0) -> None:
        super().__init__()
        self._fails, self._dies = fails, dies
        self._num_tried = 0
        self.num_replays = 0

    def capture(self, function, pool):
        self._num_tried += 1
        if self._num_tried == self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._num_tried != self._fails:
            return super().capture(function, pool)

        def spoiled():
            torch.ones(1).item()
            return function()

        return super().capture(spoiled, pool)

    def replay(self, graph):
        self.num_replays += 1
        super().replay(graph)
