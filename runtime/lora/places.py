"""Room for LoRA adapters on top of a model's linear layers, wherever these run: files in, numbers by place."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from wingbeat.runtime.lora.adapter_config import AdapterError
from wingbeat.runtime.lora.adapter_files import LinearAdapter, LinearShape, adapter_digest, read_adapter
from wingbeat.runtime.lora.resident import AdapterName, ResidentAdapters


class AdapterPlaces(ABC):
    """Places 1 to `max_loras`, each for an adapter of at most `max_rank`."""

    linears: Mapping[str, LinearShape]
    """Those that adapters may act on, by their paths in the model."""

    def __init__(self, max_loras: int, max_rank: int) -> None:
        self.max_loras, self.max_rank = max_loras, max_rank
        self.resident = ResidentAdapters(max_loras, self._load, self.clear)

    @abstractmethod
    def put(self, adapter_id: int, path: str, adapter: LinearAdapter) -> None:
        """Write what an adapter does to one linear layer into a place that was cleared."""

    @abstractmethod
    def clear(self, adapter_id: int) -> None:
        """Let a place stand for an adapter that changes nothing."""

    def inspect(self, name: str, folder: Path) -> AdapterName:
        """An adapter under the name that requests shall give.

        Raises:
            AdapterError: it cannot be served by this model; one line that says why.
        """
        read_adapter(folder, self.linears, self.max_rank)
        return AdapterName(name, str(folder), adapter_digest(folder))

    def _load(self, adapter: AdapterName, adapter_id: int) -> None:
        folder = Path(adapter.path)
        if adapter_digest(folder) != adapter.digest:
            raise AdapterError(f"{folder}: the files of adapter {adapter.name} have changed since it was loaded")
        for path, linear in read_adapter(folder, self.linears, self.max_rank).items():
            self.put(adapter_id, path, linear)
