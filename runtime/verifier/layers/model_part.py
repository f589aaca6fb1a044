"""Addition of a part of the runtime to a loaded verifier, beside what every model has."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import nn
from transformers import PreTrainedModel

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.blocks import BlockManager, KeptBeside
from wingbeat.runtime.protocol.chunk_inputs import PlacedChunk
from wingbeat.runtime.protocol.messages import Outcome
from wingbeat.runtime.round.rows import NO_COLUMNS, Feature, Rows
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.scheduling.scheduler import Seats
from wingbeat.runtime.scheduling.sequence import Sequence


class ModelPart:
    """A part's own of one verifier; this one adds nothing."""

    name: str
    """By which a verifier has it."""
    keeps_states = False
    """Whether layers remember a sequence in what cannot be taken back."""
    inner_linears: frozenset[nn.Module] = frozenset()
    """Linear layers that do not see all rows of a batch at once."""
    computed_by = ""
    """Words on changes to the model's numbers; empty for none."""
    seats: Seats | None = None
    """Seats that some requests need beside a slot."""

    def limits(self, config: EngineConfig, name: str) -> EngineConfig:
        """The limits of an engine over a model of that name; raises ValueError for what it cannot have."""
        return config

    def seq_bytes(self) -> int:
        """Memory of a running sequence."""
        return 0

    def budget(self, config: EngineConfig, budget: int) -> tuple[int, EngineConfig]:
        """Bytes that are left for keys and values, and the limits as they then are."""
        return budget, config

    def beside(self, config: EngineConfig, num_blocks: int) -> KeptBeside | None:
        """The bookkeeping of what it keeps of prefixes; `config` is one of `limits`."""
        return None

    def feature(self, slots: SlotState, config: EngineConfig, blocks: BlockManager) -> Feature | None:
        """The feature of an engine's rounds."""
        return None

    def tell(self, rows: Rows | None) -> Any:
        """Message to other processes of the verifier for a pass: numbers, texts, tensors and tuples."""
        return None

    def hear(self, told: Any) -> Mapping[type, Any]:
        """Be, in another process, as `tell` says for the pass to come; columns of its rows, by kind."""
        return NO_COLUMNS

    def requests(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> dict[str, str] | None:
        """Labels of an engine's requests in metrics; None where there are none."""
        return None

    def figures(self) -> dict[str, float]:
        """Figures of an engine in metrics; empty where there are none."""
        return {}

    def seconds(self) -> dict[str, float]:
        """Seconds of the device by stage, beside those of every model."""
        return {}


class SpanReader(ModelPart, ABC):
    """Part that reads spans of prompts; a verifier has at most one."""

    whole_spans: bool
    """Whether they are whole, see `PromptSpan.whole`."""

    @abstractmethod
    def check(self, request: Request, most_at_once: int) -> None:
        """Raises ValueError, one line that begins with a span's kind, for spans that the model cannot have.

        Args:
            most_at_once: prompt tokens of a round.
        """

    @abstractmethod
    def told(self, width: int) -> dict[str, int]:
        """Fields of a `ChannelSpec` to a drafter that reads embeddings of this width."""

    @abstractmethod
    def tell_inputs(self, outcome: Outcome, chunks: list[PlacedChunk]) -> int:
        """See `TellInputs`."""


class Remembered(Protocol):
    """Memory of layers of a sequence beside keys and values."""

    def install(self, model: PreTrainedModel, attention: str, whole: bool) -> ModelPart:
        """Let layers of a model, which otherwise is in its final form, take part in rounds.

        Args:
            attention: name of the attention function that the model has, which it gets back.
            whole: see `prepare_model`.

        Raises:
            UnsupportedModelError: they cannot; without the model's name.
        """
        ...
