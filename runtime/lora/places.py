"""Slots for LoRA adapters on a model's linear layers, and loading of files into slots. The code is common to all
backends.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wingbeat.kernels.lora.stacked_adapters import AdapterRows
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.lora.adapter import AdapterError, LinearAdapter, LinearShape
from wingbeat.runtime.lora.adapter_files import adapter_digest, read_adapter
from wingbeat.runtime.lora.resident import ResidentAdapters
from wingbeat.runtime.round.rows import Feature, Placed
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.plan import SchedulerOutput
from wingbeat.runtime.scheduling.request import Variant
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.layers.model_part import ModelPart


class AdapterPlaces(ModelPart, ABC):
    """Adapter slots 1 to `max_loras`, each for an adapter of rank at most `max_rank`."""

    name = "adapters"
    linears: Mapping[str, LinearShape]
    """Linear layers that adapters may act on, by path in the model."""

    def __init__(self, max_loras: int, max_rank: int) -> None:
        self.max_loras, self.max_rank = max_loras, max_rank
        self.resident = self.seats = ResidentAdapters(max_loras, self._load, self.clear)
        self.rows: AdapterRows | None = None
        """Adapter rows of the running forward pass; None if no row has an adapter."""

    @abstractmethod
    def rows_of(self, ids: Tensor, on_host: bool) -> AdapterRows:
        """Returns the adapter of each row of a pass; for the arguments see `AdapterRows.of`."""

    def feature(self, slots: SlotState, config: EngineConfig, blocks: BlockManager, cache: KVCache) -> "Adapters":
        """See `ModelPart.feature`."""
        return Adapters(self, slots)

    def requests(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> dict[str, str]:
        """See `ModelPart.requests`; returns the requests' adapters, under vLLM's names."""
        return {
            "max_lora": str(self.max_loras),
            "waiting_lora_adapters": _names(waiting),
            "running_lora_adapters": _names(running),
        }

    @abstractmethod
    def put(self, adapter_id: int, path: str, adapter: LinearAdapter) -> None:
        """Writes an adapter's matrices for one linear layer into a cleared slot."""

    @abstractmethod
    def clear(self, adapter_id: int) -> None:
        """Resets a slot to an adapter without effect."""

    def inspect(self, name: str, folder: Path) -> Variant:
        """Checks an adapter and returns it under the name that requests use.

        Raises:
            AdapterError: this model cannot serve the adapter; the message is one line with the reason.
        """
        read_adapter(folder, self.linears, self.max_rank)
        return Variant(name, str(folder), adapter_digest(folder))

    def _load(self, adapter: Variant, adapter_id: int) -> None:
        folder = Path(adapter.path)
        if adapter_digest(folder) != adapter.digest:
            raise AdapterError(f"{folder}: the files of adapter {adapter.name} have changed since it was loaded")
        for path, linear in read_adapter(folder, self.linears, self.max_rank).items():
            self.put(adapter_id, path, linear)


class Adapters(Feature):
    """The LoRA feature: determines the adapter of each row."""

    kind = AdapterRows
    can_be_absent = True

    def __init__(self, adapters: AdapterPlaces, slots: SlotState) -> None:
        self.adapters = adapters
        self._ids = torch.zeros(slots.spare + 1, dtype=torch.int64, device=slots.device)
        """Adapter id of the sequence in each slot. Nothing is written to this tensor before the first sequence with an
        adapter.
        """
        self._any = False

    def admit(self, seq: Sequence) -> None:
        """See `Feature.admit`."""
        self._any = self._any or bool(seq.seat)
        if self._any:
            self._ids[seq.slot].fill_(seq.seat)

    def is_used(self, plan: SchedulerOutput) -> bool:
        """See `Feature.is_used`."""
        return any(seq.seat for seq in plan.decodes) or any(chunk.seq.seat for chunk in plan.chunks)

    def column(self, placed: Placed) -> AdapterRows:
        """See `Feature.column`."""
        return self.adapters.rows_of(self._ids[placed.slots], placed.on_host)

    @contextmanager
    def entered(self, column: AdapterRows | None, inputs: dict[str, Any]) -> Iterator[None]:
        """See `Feature.entered`; sets the adapter rows for linear layers that run outside a fused layer."""
        self.adapters.rows = column
        try:
            yield
        finally:
            self.adapters.rows = None


def _names(seqs: Iterable[Sequence]) -> str:
    return ",".join(sorted({seq.request.variant.name for seq in seqs if seq.request.variant is not None}))
