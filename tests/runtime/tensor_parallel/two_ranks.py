"""A second process that follows one model after the other, beside rank 0 in the test's own."""

import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.drafters.base import Drafter, DrafterNeeds
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.fused import layers as fused
from wingbeat.runtime.fused.layers import LayerOps
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.llm import connect
from wingbeat.runtime.tensor_parallel.follower import follow
from wingbeat.runtime.tensor_parallel.group import RankGroup
from wingbeat.runtime.tensor_parallel.leader import Led, lead

DEVICE = torch.device("cpu")
ANSWER_S = 120.0


def stored(folder: Path) -> torch.dtype:
    """The dtype that a model was saved in."""
    return getattr(torch, json.loads((folder / "config.json").read_text())["dtype"])


class SecondRank:
    """Starts where there is none; what it raises is told as a line of text."""

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def join(
        self,
        group: RankGroup,
        folder: Path,
        rank: int = 1,
        limits: EngineConfig | None = None,
        graph_device: GraphDevice | None = None,
        ops: dict[str, LayerOps] | None = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        """Be a rank of a group: rank 1 until rank 0 ends it, rank 0 until it has loaded, when it is killed.

        Args:
            ops: steps of fused layers, by type of device.
            before: called in the rank's process first.
        """
        if self._process is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
            self._pipe, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(other,), daemon=True)
            self._process.start()
            other.close()
        limits = EngineConfig() if limits is None else limits
        self._pipe.send((group, folder, rank, limits, graph_device, ops or {}, before))

    @property
    def pid(self) -> int:
        return self._process.pid

    def last_words(self) -> str | None:
        """Error that ended rank 1; None where rank 0 ended it."""
        assert self._pipe.poll(ANSWER_S), "rank 1 goes on"
        return self._pipe.recv()

    def kill(self, how: int = signal.SIGKILL) -> None:
        """Send it a signal, and wait for its end by SIGKILL; harmless once it has ended."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, how)
        if how == signal.SIGKILL:
            self._process.join()
            self._process = None


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        group, folder, rank, limits, graph_device, fused.OPS, before = pipe.recv()
        try:
            if before is not None:
                before()
            if rank == 0:
                lead(group, folder, stored(folder), DEVICE, limits)
                os.kill(os.getpid(), signal.SIGKILL)
            follow(group, rank, folder, stored(folder), DEVICE, limits, graph_device)
            pipe.send(None)
        except Exception as error:
            traceback.print_exc()
            pipe.send(f"{type(error).__name__}: {error}")


@contextmanager
def led_model(
    second: SecondRank,
    model: PreTrainedModel,
    folder: Path,
    limits: EngineConfig,
    ends: bool = True,
    graph_device: GraphDevice | None = None,
    ops: dict[str, LayerOps] | None = None,
    before: Callable[[], object] | None = None,
) -> Iterator[Led]:
    """Rank 0 of a model over two ranks, which this ends.

    Args:
        graph_device: of rank 1.
        ops: of rank 1; those of this process where None.
        before: see `SecondRank.join`.
    """
    model.save_pretrained(folder)
    group = RankGroup(folder / "ranks", 2)
    second.join(group, folder, limits=limits, graph_device=graph_device, ops=ops or fused.OPS, before=before)
    try:
        led = lead(group, folder, stored(folder), DEVICE, limits)
        yield led
    except BaseException:
        second.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    if ends:
        led.backend.close()
        assert second.last_words() is None


def led_engine(
    led: Led, config: EngineConfig, drafter: Drafter | None = None, graph_device: GraphDevice | None = None
) -> Engine:
    """An engine of rank 0, and its drafter in this thread."""
    needs = DrafterNeeds() if drafter is None else drafter.needs
    engine = Engine(led.loaded, config, needs, graph_device, backend=led.backend)
    if drafter is not None:
        connect(engine, drafter, InProcessChannel)
    return engine
