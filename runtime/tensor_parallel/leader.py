"""Rank 0: a regular engine that announces each forward pass of the model to the other ranks."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.refusals import refuse
from wingbeat.runtime.tensor_parallel.graphs import LeadingGraphs
from wingbeat.runtime.tensor_parallel.group import KV_READER, RANKS, REFUSED, RankGroup
from wingbeat.runtime.tensor_parallel.rank_messenger import RankMessenger
from wingbeat.runtime.tensor_parallel.ranks import Ranks
from wingbeat.runtime.tensor_parallel.shards import load_shard
from wingbeat.runtime.verifier.backend import Backend
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.model import VerifierModel

logger = logging.getLogger(__name__)


class Leader(Backend):
    """Announces each forward pass of the model to the other ranks: those of rounds, of the trial at load, and of
    measurements.

    Args:
        loaded: this rank's part of the model; its `forward` is replaced.
    """

    def __init__(self, loaded: LoadedModel, ranks: Ranks) -> None:
        self.ranks = ranks
        self.messenger = RankMessenger(ranks, loaded.parts)
        if loaded.shards is not None:
            loaded.shards.tell, loaded.shards.change_memory = self.messenger.change_weight, self.messenger.change_memory
        self._run = loaded.model.forward
        loaded.model.forward = self._forward

    def parts(
        self, loaded: LoadedModel, config: EngineConfig, tap_layers: tuple[int, ...], kv_layers: tuple[int, ...]
    ) -> tuple[VerifierModel, KVCache]:
        """Builds model and KV cache, as every backend does.

        Raises:
            ValueError: the drafter reads keys and values, but each rank has only some of the KV heads.
        """
        if kv_layers:
            reads = f"the drafter reads keys and values of layers {list(kv_layers)}"
            refuse({KV_READER: reads, RANKS: f"tensor_parallel_size is {self.ranks.size}"}, REFUSED)
        cache = FollowedCache(self.messenger, loaded, config)
        return VerifierModel(loaded, tap_layers), cache

    def graph_device(self, device: GraphDevice) -> GraphDevice:
        """Returns a graph device that captures rounds on all ranks."""
        return LeadingGraphs(self.messenger, device)

    def close(self) -> None:
        """Ends the other ranks."""
        self.ranks.tell(b"", torch.zeros(0, dtype=torch.uint8))
        self.ranks.close()

    def _forward(self, **inputs: Any) -> Any:
        """Runs the model's forward on all ranks; raises the errors of `RankMessenger.a_pass`."""
        with self.messenger.a_pass(**inputs):
            return self._run(**inputs)


class FollowedCache(KVCache):
    """KV cache of rank 0; its moves are announced to the other ranks."""

    def __init__(self, messenger: RankMessenger, loaded: LoadedModel, config: EngineConfig) -> None:
        super().__init__(loaded.layers, config, loaded.dtype, loaded.device, loaded.pool_memory)
        self._messenger = messenger

    def own_pools(self) -> None:
        """Returns None, so that all moves go through `move`, which announces them to the other ranks."""

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Runs `KVCache.move` on all ranks."""
        super().move(from_slots, to_slots)
        self._messenger.moved(from_slots, to_slots)


class Led(NamedTuple):
    """Components from which the engine on rank 0 is built."""

    loaded: LoadedModel
    limits: EngineConfig
    backend: Leader


def lead(group: RankGroup, path: Path, dtype: torch.dtype, device: torch.device, limits: EngineConfig) -> Led:
    """Loads rank 0's part of a model. The other ranks load their parts at the same time, and then execute rank 0's
    messages.

    Raises:
        ValueError: the limits need a feature that cannot be combined with tensor parallelism, or as for `load_shard`;
            the message is one line that names the setting to change.
        BackendLost: another rank failed.
    """
    refuse(limits.asked() | {RANKS: f"tensor_parallel_size is {group.size}"}, REFUSED)
    ranks = Ranks(group, 0, device)
    loaded = load_shard(path, dtype, ranks, limits)
    num_kv_heads = loaded.layers[0].num_kv_heads
    logger.info("tensor parallel over %d ranks, each with %d of the KV heads", group.size, num_kv_heads)
    own = limits.cpu_memory_utilization / group.size
    return Led(loaded, replace(limits, cpu_memory_utilization=own), Leader(loaded, ranks))
