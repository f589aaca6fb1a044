"""Rank 0: an engine like any other, whose every pass of the model is told to the other ranks first."""

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.refusals import refuse
from wingbeat.runtime.round.rows import NO_COLUMNS, ROWS_KEYWORD, Rows
from wingbeat.runtime.tensor_parallel.group import KV_READER, RANKS, REFUSED, RankGroup
from wingbeat.runtime.tensor_parallel.ranks import Ranks
from wingbeat.runtime.tensor_parallel.round_message import PoolShape, RoundMessage, pack
from wingbeat.runtime.tensor_parallel.shards import load_shard
from wingbeat.runtime.verifier.backend import Backend
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.model import VerifierModel
from wingbeat.runtime.verifier_errors import BackendLost

logger = logging.getLogger(__name__)


class Leader(Backend):
    """Tells the others of every pass, whoever asks for it: the engine's rounds, a trial, a measurement.

    Args:
        loaded: this rank's part; its model's forward is replaced.
    """

    def __init__(self, loaded: LoadedModel, ranks: Ranks) -> None:
        self.ranks = ranks
        self._run = loaded.model.forward
        self._keys: Callable[[], Tensor | None] = lambda: None
        """Of the pool's first layer, while there is that pool."""
        self._pool: PoolShape | None = None
        self._moves: list[tuple[Tensor, Tensor]] = []
        self._parts = loaded.parts
        self._in_step = True
        loaded.model.forward = self._forward

    def parts(
        self, loaded: LoadedModel, config: EngineConfig, tap_layers: tuple[int, ...], kv_layers: tuple[int, ...]
    ) -> tuple[VerifierModel, KVCache]:
        """As for every backend.

        Raises:
            ValueError: the drafter asks for keys and values, of which each rank has some heads.
        """
        if kv_layers:
            reads = f"the drafter reads keys and values of layers {list(kv_layers)}"
            refuse({KV_READER: reads, RANKS: f"tensor_parallel_size is {self.ranks.size}"}, REFUSED)
        cache = FollowedCache(self, loaded, config)
        return VerifierModel(loaded, tap_layers), cache

    def moved(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Have the other ranks move keys and values likewise, before their next pass."""
        self._moves.append((from_slots, to_slots))

    def close(self) -> None:
        """End the other ranks."""
        self.ranks.tell(b"", torch.zeros(0, dtype=torch.uint8))
        self.ranks.close()

    def _forward(self, **inputs: Any) -> Any:
        """The model's forward, on all ranks.

        Raises:
            BackendLost: a rank is gone, or an earlier pass has left them in different places.
        """
        if not self._in_step:
            raise BackendLost("a pass of the verifier has failed, and its ranks are no longer in step")
        self._in_step = False
        self.ranks.tell(*pack(self._message(**inputs)))
        output = self._run(**inputs)
        self._in_step = True
        return output

    def _message(self, input_ids: Tensor, **inputs: Any) -> RoundMessage:
        rows: Rows | None = inputs.get(ROWS_KEYWORD)
        told = tuple((name, part.tell(rows)) for name, part in self._parts.items())
        if rows is not None:
            self._use(rows.caches)
            rows = rows._replace(caches=[], packed=None, columns=NO_COLUMNS, around=(), chunk_rows=None)
        moves, self._moves = tuple(self._moves), []
        return RoundMessage(input_ids if rows is None else None, rows, self._pool, moves, told)

    def _use(self, caches: list[tuple[Tensor, Tensor]]) -> None:
        keys = caches[0][0]
        if self._keys() is not keys:
            self._keys = weakref.ref(keys)
            self._pool = PoolShape(1 if self._pool is None else self._pool.number + 1, *keys.shape[:2])


class FollowedCache(KVCache):
    """The engine's keys and values on rank 0; what it moves, the others move."""

    def __init__(self, leader: Leader, loaded: LoadedModel, config: EngineConfig) -> None:
        super().__init__(loaded.layers, config, loaded.dtype, loaded.device)
        self._leader = leader

    def own_pools(self) -> None:
        """None: the other ranks hear of each move."""

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """As `KVCache.move`, on all ranks."""
        super().move(from_slots, to_slots)
        self._leader.moved(from_slots, to_slots)


class Led(NamedTuple):
    """What an engine of rank 0 is built from."""

    loaded: LoadedModel
    limits: EngineConfig
    backend: Leader


def lead(group: RankGroup, path: Path, dtype: torch.dtype, device: torch.device, limits: EngineConfig) -> Led:
    """Load rank 0's part of a model; the other ranks load theirs at the same time, and follow from then on.

    Raises:
        ValueError: the limits ask for what ranks do not have, or as `load_shard`; one line that says what to change.
        BackendLost: another rank failed.
    """
    refuse(limits.asked() | {RANKS: f"tensor_parallel_size is {group.size}"}, REFUSED)
    ranks = Ranks(group, 0, device)
    loaded = load_shard(path, dtype, ranks, limits)
    logger.info(
        "tensor parallel over %d ranks, each with %d of the KV heads; rounds run eagerly, without CUDA graphs",
        group.size,
        loaded.layers[0].num_kv_heads,
    )
    own = limits.cpu_memory_utilization / group.size
    return Led(loaded, replace(limits, cuda_graphs=False, cpu_memory_utilization=own), Leader(loaded, ranks))
