"""The other ranks: no scheduler, no requests and no drafter, just the passes that rank 0 tells of."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice, GraphDevice
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.parts import first
from wingbeat.runtime.tensor_parallel.graphs import FollowingGraphs
from wingbeat.runtime.tensor_parallel.group import RankGroup
from wingbeat.runtime.tensor_parallel.ranks import Ranks
from wingbeat.runtime.tensor_parallel.round_message import PoolShape, RoundMessage, unpack
from wingbeat.runtime.tensor_parallel.shards import load_shard
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.model import VerifierModel


def follow(
    group: RankGroup,
    rank: int,
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    limits: EngineConfig,
    graph_device: GraphDevice | None = None,
) -> None:
    """Load a rank's part of a model and run what rank 0 runs, until it ends.

    Args:
        limits: those that rank 0 has.
        graph_device: captures this rank's part of rounds in place of CUDA.

    Raises:
        ValueError: as `load_shard`; or an adapter's files have changed since rank 0 read them.
        BackendLost: rank 0 or another one is gone.
    """
    ranks = Ranks(group, rank, device)
    try:
        Follower(load_shard(path, dtype, ranks, limits), ranks, graph_device).follow()
    finally:
        ranks.close()


class Follower:
    """One rank's part of the model, and of the keys and values."""

    def __init__(self, loaded: LoadedModel, ranks: Ranks, graph_device: GraphDevice | None = None) -> None:
        self._loaded = loaded
        self._ranks = ranks
        self._graph_device = graph_device
        self._model = VerifierModel(loaded)
        self._pool: PoolShape | None = None
        self._cache: KVCache | None = None

    def follow(self) -> None:
        """Do what rank 0 tells, until it ends; raises as `follow`."""
        try:
            while True:
                form, numbers = self._ranks.hear()
                if not form:
                    return
                self.run(unpack(form, numbers))
        finally:
            self._forget_graphs()  # before what their sums go through is closed

    @torch.inference_mode()
    def run(self, message: RoundMessage) -> None:
        """Do as a message says; its purpose is rank 0's matter."""
        for from_slots, to_slots in message.moves:
            self._cache.move(from_slots, to_slots)
        columns: dict[type, Any] = {}
        for name, told in message.parts:
            columns |= self._loaded.parts[name].hear(told)
        if message.written is not None:
            self._write(*message.written)
        elif message.order is not None:
            self._graphs.obey(message.order)
        elif message.observed is not None:
            self._model.observe(message.observed)
        elif message.rows is not None:
            if message.pool != self._pool:
                self._use(message.pool)
            self._model(message.rows._replace(caches=self._cache.layers, columns=columns))

    def _write(self, name: str, value: Tensor | None) -> None:
        if value is None:
            self._weights.finish()
        elif name in self._weights:  # addends that count once are rank 0's alone
            self._weights.write(name, value)

    @cached_property
    def _weights(self) -> Any:
        """This rank's parts of the weights, where rank 0 writes some."""
        return first("served_weights", self._loaded)

    @cached_property
    def _graphs(self) -> FollowingGraphs:
        """Made where rank 0 captures something."""
        device = self._graph_device or CudaGraphDevice(self._loaded.device)
        return FollowingGraphs(self._ranks, device, self.run)

    def _forget_graphs(self) -> None:
        if "_graphs" in vars(self):
            self._graphs.forget()

    def _use(self, pool: PoolShape) -> None:
        self._forget_graphs()
        self._cache = None  # before the next one needs the room
        limits = EngineConfig(num_kv_blocks=pool.num_blocks, block_size=pool.block_size, lower_max_model_len=True)
        self._cache = KVCache(self._loaded.layers, limits, self._loaded.dtype, self._loaded.device)
        self._pool = pool
