"""Interfaces by which runtime parts extend a loaded verifier (LoRA, media, recurrent states)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import nn
from transformers import PreTrainedModel

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.blocks import BlockManager, KeptBeside
from wingbeat.runtime.kv.pool import KVCache, PoolMemory
from wingbeat.runtime.protocol.chunk_inputs import PlacedChunk
from wingbeat.runtime.protocol.messages import Outcome
from wingbeat.runtime.round.rows import NO_COLUMNS, Feature, Rows
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.scheduling.scheduler import Seats
from wingbeat.runtime.scheduling.sequence import Sequence


class ModelPart:
    """A runtime part's extension of one verifier; this base class adds nothing."""

    name: str
    """Key in `LoadedModel.parts`."""
    keeps_states = False
    """Whether layers keep recurrent states, which cannot be rolled back."""
    inner_linears: frozenset[nn.Module] = frozenset()
    """Linear layers that process only some rows of a batch in a call, such as those of experts."""
    computed_by = ""
    """Description of changes to the model's logits; empty if the part changes none."""
    seats: Seats | None = None
    """Seats (such as memory for an adapter) that some requests need besides a slot; None if no request needs a seat."""
    mapped_bytes = 0
    """Bytes that the part holds on the device outside torch's allocator."""

    def limits(self, config: EngineConfig, name: str) -> EngineConfig:
        """Returns an engine's configuration, adjusted to the part; `name` is the model's name.

        Raises ValueError for unsupported settings.
        """
        return config

    def seq_bytes(self) -> int:
        """Bytes of state that the part keeps for a running sequence."""
        return 0

    def budget(self, config: EngineConfig, budget: int) -> tuple[int, EngineConfig]:
        """Returns the bytes of `budget` that are left for keys and values, and the adjusted configuration."""
        return budget, config

    def block_bytes(self, config: EngineConfig, num_bytes: int) -> int:
        """Returns the bytes by which KV memory grows with each block, given a block's bytes over all layers."""
        return num_bytes

    def fixed_kv_bytes(self, config: EngineConfig) -> int:
        """Returns the bytes of KV memory that do not grow with the number of blocks; `config` is a result of
        `budget`."""
        return 0

    def memory_note(self, config: EngineConfig) -> str:
        """Returns a clause about the part's KV memory for the log; empty if there is nothing to report."""
        return ""

    def make_cache(self, config: EngineConfig, memory: PoolMemory | None) -> KVCache | None:
        """Creates the KV cache of an engine; None leaves the cache as it is without the part.

        `config` is a result of `limits`; for `memory`, see `KVCache`.
        """
        return None

    def beside(self, config: EngineConfig, num_blocks: int) -> KeptBeside | None:
        """Creates the bookkeeping of the state that the part keeps for prefixes; None if the part keeps no such state.

        `config` is a result of `limits`.
        """
        return None

    def feature(self, slots: SlotState, config: EngineConfig, blocks: BlockManager, cache: KVCache) -> Feature | None:
        """Returns the feature that the part adds to an engine's rounds."""
        return None

    def tell(self, rows: Rows | None) -> Any:
        """Returns the part's message to the verifier's other processes for a pass.

        The message may consist of numbers, strings, tensors and tuples.
        """
        return None

    def hear(self, told: Any) -> Mapping[type, Any]:
        """Applies the message of `tell` in another process before the pass.

        Returns the columns to add to the pass's rows, by `Feature.kind`.
        """
        return NO_COLUMNS

    def requests(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> dict[str, str] | None:
        """Returns request labels for metrics; None if the part has no labels."""
        return None

    def figures(self) -> dict[str, float]:
        """Returns the part's metrics; empty if the part has no metrics."""
        return {}

    def seconds(self) -> dict[str, float]:
        """Returns device seconds by stage, for stages that only this part has."""
        return {}


class SpanReader(ModelPart, ABC):
    """Runtime part that reads media spans of prompts; a verifier has at most one such part."""

    whole_spans: bool
    """Whether a span must stay in one round, see `PromptSpan.whole`."""

    @abstractmethod
    def check(self, request: Request, most_at_once: int) -> None:
        """Raises ValueError for spans that the model cannot process.

        The message is one line that begins with the span's kind.

        Args:
            most_at_once: largest number of prompt tokens per round.
        """

    @abstractmethod
    def channel_fields(self, width: int) -> dict[str, int]:
        """Returns fields of a `ChannelSpec` for a drafter that reads embeddings of width `width`."""

    @abstractmethod
    def tell_inputs(self, outcome: Outcome, chunks: list[PlacedChunk]) -> int:
        """See `TellInputs`."""


class Remembered(Protocol):
    """State that layers keep for each sequence, beside keys and values."""

    def install(self, model: PreTrainedModel, attention: str, whole: bool) -> ModelPart:
        """Adapts layers to keep their state over rounds. All other changes to the model must have been made.

        Args:
            attention: name of the model's attention function, which is restored afterwards.
            whole: whether the model is not divided among processes, see `prepare_model`.

        Raises:
            UnsupportedModelError: the layers cannot be adapted; the message does not contain the model's name.
        """
        ...
