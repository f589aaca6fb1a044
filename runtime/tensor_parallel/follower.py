"""The other ranks: no scheduler, no requests and no drafter, just the passes that rank 0 tells of."""

from pathlib import Path

import torch

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.tensor_parallel.group import RankGroup
from wingbeat.runtime.tensor_parallel.ranks import Ranks
from wingbeat.runtime.tensor_parallel.round_message import PoolShape, RoundMessage, unpack
from wingbeat.runtime.tensor_parallel.shards import load_shard
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.model import VerifierModel


def follow(
    group: RankGroup, rank: int, path: Path, dtype: torch.dtype, device: torch.device, limits: EngineConfig
) -> None:
    """Load a rank's part of a model and run what rank 0 runs, until it ends.

    Args:
        limits: those that rank 0 has.

    Raises:
        ValueError: as `load_shard`; or an adapter's files have changed since rank 0 read them.
        BackendLost: rank 0 or another one is gone.
    """
    ranks = Ranks(group, rank, device)
    try:
        follower = Follower(load_shard(path, dtype, ranks, limits))
        while True:
            form, numbers = ranks.hear()
            if not form:
                return
            follower.run(unpack(form, numbers))
    finally:
        ranks.close()


class Follower:
    """One rank's part of the model, and of the keys and values."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._model = VerifierModel(loaded)
        self._pool: PoolShape | None = None
        self._cache: KVCache | None = None

    @torch.inference_mode()
    def run(self, message: RoundMessage) -> None:
        """One pass: what it is for is rank 0's matter."""
        for from_slots, to_slots in message.moves:
            self._cache.move(from_slots, to_slots)
        for name, told in message.parts:
            self._loaded.parts[name].hear(told)
        if message.rows is None:
            self._model.observe(message.observed)
            return
        if message.pool != self._pool:
            self._use(message.pool)
        self._model(message.rows._replace(caches=self._cache.layers))

    def _use(self, pool: PoolShape) -> None:
        self._cache = None  # before the next one needs the room
        limits = EngineConfig(num_kv_blocks=pool.num_blocks, block_size=pool.block_size, lower_max_model_len=True)
        self._cache = KVCache(self._loaded.layers, limits, self._loaded.dtype, self._loaded.device)
        self._pool = pool
