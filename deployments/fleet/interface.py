"""What the HTTP surface asks of the engines behind it; it does not know where they run."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from wingbeat.runtime.scheduling.request import Request, RequestOutput


class TryLater(Exception):
    """The same request can succeed later."""

    def __init__(self, message: str = "", *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds after which it is worth trying again."""


class EngineOverloaded(TryLater):
    """No engine may queue another request; the same request can succeed a moment later."""


class EngineUnavailable(TryLater):
    """No engine is there to take the request, or the one that had it is gone."""


class RequestFailed(Exception):
    """Processing this request raised in its engine; the engine and its other requests go on."""


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


class Admission(Protocol):
    """Places for requests, in the engines or in the queue before them; taken until they are released."""

    def release(self, num_requests: int | None = None) -> None:
        """Give back some places, or all that are left; more than are left are not given back."""
        ...


class EnginePool(Protocol):
    """All engines that serve one model."""

    @property
    def info(self) -> ModelInfo:
        """The model every engine of the pool serves."""
        ...

    @property
    def max_requests(self) -> int:
        """Requests that one engine runs and this router queues: more are never admitted together."""
        ...

    def admit(self, num_requests: int) -> Admission:
        """Take places for requests that are to run together: all of them, or none.

        Raises:
            EngineOverloaded: there are not so many places now.
            EngineUnavailable: there is no engine.
        """
        ...

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Run a request that was admitted; yields its tokens as they arrive, several per output possible.

        The last output carries finish_reason, metrics and num_cached_tokens; an earlier one may carry the metrics
        so far.
        Closing the generator early (aclose, cancellation) aborts the request and frees its blocks.

        Raises:
            EngineUnavailable: at any time, when no engine is there or those that ran the request died.
            RequestFailed: processing the request raised.
        """
        ...

    def healthy(self) -> bool:
        """Whether a request sent now would find an engine."""
        ...


def model_info(fields: dict[str, Any]) -> ModelInfo:
    """What `Verifier.describe` tells, read back."""
    return ModelInfo(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"])})
