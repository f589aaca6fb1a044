"""What the HTTP surface asks of the engines behind it; it does not know where they run."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from wingbeat.runtime.request import Request, RequestOutput


@dataclass(frozen=True)
class ModelInfo:
    """The served model, as far as requests are checked against it."""

    model_name: str
    """The name requests give in `model`."""
    max_model_len: int
    """Longest sequence, prompt and output together, in tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    drafter: str = "none"
    """One word or path for people to read."""


class EnginePool(Protocol):
    """All engines that serve one model."""

    @property
    def info(self) -> ModelInfo:
        """The model every engine of the pool serves."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Run a request; yields its tokens as they arrive, several per output possible.

        The last output carries finish_reason, metrics and num_cached_tokens; an earlier one may carry the metrics
        so far.
        Closing the generator early (aclose, cancellation) aborts the request and frees its blocks.

        Raises:
            EngineOverloaded: before the first output, when no engine may queue the request.
            EngineUnavailable: at any time, when no engine is there or the one that ran the request died.
        """
        ...

    def healthy(self) -> bool:
        """Whether a request sent now would find an engine."""
        ...
