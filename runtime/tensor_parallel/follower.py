"""Ranks other than 0. They run the forward passes that rank 0 announces, and have no scheduler, requests or drafter."""

from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice, GraphDevice
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.tensor_parallel.graphs import FollowingGraphs
from wingbeat.runtime.tensor_parallel.group import RankGroup
from wingbeat.runtime.tensor_parallel.rank_messenger import problem_of
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
    """Loads a rank's part of a model and runs rank 0's passes until rank 0 ends.

    Args:
        limits: config of rank 0's engine.
        graph_device: graph device that captures this rank's part of rounds; None means CUDA graphs.

    Raises:
        ValueError: as for `load_shard`; or an adapter's files have changed since rank 0 read them.
        BackendLost: rank 0 or another rank is gone.
    """
    ranks = Ranks(group, rank, device)
    try:
        Follower(load_shard(path, dtype, ranks, limits), ranks, graph_device).follow()
    finally:
        ranks.close()


class Follower:
    """A rank's part of the model and of the KV cache, and the loop that executes rank 0's messages."""

    def __init__(self, loaded: LoadedModel, ranks: Ranks, graph_device: GraphDevice | None = None) -> None:
        self._loaded = loaded
        self._ranks = ranks
        self._graph_device = graph_device
        self._model = VerifierModel(loaded)
        self._pool: PoolShape | None = None
        self._cache: KVCache | None = None
        self._saved: dict[str, Any] = {}
        """Parts of weights, by name, that the open update has overwritten."""

    def follow(self) -> None:
        """Executes rank 0's messages until rank 0 ends; raises the errors of the function `follow`."""
        try:
            while True:
                form, numbers = self._ranks.hear()
                if not form:
                    return
                self.run(unpack(form, numbers))
        finally:
            # The graphs are released before the process group is closed, because their collectives use the process
            # group.
            self._forget_graphs()

    @torch.inference_mode()
    def run(self, message: RoundMessage) -> None:
        """Executes one message."""
        for from_slots, to_slots in message.moves:
            self._cache.move(from_slots, to_slots)
        columns: dict[type, Any] = {}
        for name, told in message.parts:
            columns |= self._loaded.parts[name].hear(told)
        if message.weight is not None:
            self._change_weight(*message.weight)
        elif message.memory is not None:
            layers = [] if self._cache is None else self._cache.layers
            change = partial(first_result, "change_memory", self._loaded, layers, *message.memory)
            self._ranks.agree(problem_of(change))
        elif message.order is not None:
            self._graphs.obey(message.order)
        elif message.observed is not None:
            self._model.observe(message.observed)
        elif message.rows is not None:
            if message.pool != self._pool:
                self._use(message.pool)
            self._model(message.rows._replace(caches=self._cache.layers, columns=columns))

    def _change_weight(self, step: str, name: str, value: Tensor | None) -> None:
        if step == "finish":
            self._weights.finish()
            self._saved.clear()
        elif name not in self._weights:  # the bias of a summed layer exists only on rank 0, so that it is added once
            return
        elif step == "write":
            self._weights.write(name, value)
        elif step == "read":
            self._weights.read(name)
        elif step == "save":
            self._saved[name] = self._weights.save(name)
        else:
            self._weights.restore(name, self._saved.pop(name))

    @cached_property
    def _weights(self) -> Any:
        """This rank's parts of the weights; created when rank 0 writes weights."""
        return first_result("served_weights", self._loaded)

    @cached_property
    def _graphs(self) -> FollowingGraphs:
        """Graphs of this rank's parts of rounds; created when rank 0 captures a round."""
        device = self._graph_device or CudaGraphDevice(self._loaded.device)
        return FollowingGraphs(self._ranks, device, self.run)

    def _forget_graphs(self) -> None:
        if "_graphs" in vars(self):
            self._graphs.forget()

    def _use(self, pool: PoolShape) -> None:
        self._forget_graphs()
        self._cache = None  # frees the memory before the next pool is allocated
        limits = EngineConfig(num_kv_blocks=pool.num_blocks, block_size=pool.block_size, lower_max_model_len=True)
        loaded = self._loaded
        self._cache = KVCache(loaded.layers, limits, loaded.dtype, loaded.device, loaded.pool_memory)
        self._pool = pool
