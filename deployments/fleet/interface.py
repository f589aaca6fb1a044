"""Types that the HTTP API gets from the engines: the model's description, and errors of requests."""

from dataclasses import dataclass, field

from wingbeat.runtime.scheduling.request import Variant


class TryLater(Exception):
    """The request failed, but an equal request can succeed later."""

    def __init__(self, message: str = "", *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds after which a retry is worthwhile."""


class EngineOverloaded(TryLater):
    """All queues are full; an equal request can succeed a moment later."""


class EngineUnavailable(TryLater):
    """There is no engine to run the request, or the engine that ran the request is lost and no other engine can
    continue the request.
    """


class RouterGone(Exception):
    """An engine has closed the connection of a router that has not called for too long, and aborted its requests."""


class RequestRefused(ValueError):
    """No engine can ever run this request; the message begins with the name of the field that is the cause."""


class RequestFailed(Exception):
    """Processing this request raised an exception in its engine; the engine and its other requests continue."""


class EnginesEnded(RequestFailed):
    """Several engines in a row died, or were ended because they were stuck, while running this request.

    Args:
        num_engines: number of engines.
        last: why the last engine died, as text for the log.
    """

    def __init__(self, num_engines: int, last: str) -> None:
        engines = "An engine" if num_engines == 1 else f"{num_engines} engines in a row"
        self.for_caller = f"{engines} died or had to be ended while running this request; it is not tried again."
        """Error message for the client, without internal details."""
        super().__init__(f"{self.for_caller} The last one: {last}")


@dataclass(frozen=True)
class ModelInfo:
    """Description of the served model, against which requests are checked."""

    model_name: str
    """First of the names that requests may pass as `model`."""
    max_model_len: int
    """Maximum length of a sequence (prompt and output together) in tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    """Torch's name of the dtype of weights and KV cache."""
    drafter: str = "none"
    """Name or path of the drafter, for display."""
    drafts_from_other_requests: bool = False
    """Whether drafts may come from the texts of other requests. Rejected draft tokens must then not be shown."""
    num_spec_tokens: int = 0
    """Maximum depth of a draft tree."""
    max_num_seqs: int | None = None
    """Sequences that one engine runs at once; None if the engine's factory does not report the number."""
    num_kv_tokens: int = 0
    """Tokens that the KV pool of one engine holds; 0 if the engine's factory does not report the number."""
    block_size: int = 0
    """Tokens per block of the engines' prefix caches; 0 if engines have no prefix cache or do not report it."""
    variants: tuple[Variant, ...] = ()
    """Variants of the model that are served from the start."""
    takes: dict[str, str] = field(default_factory=dict)
    """For each kind of media for which the model has an encoder: `served`, or the reason why the kind is not served."""
    text_identity: str = ""
    """See `AppConfig.text_identity`."""
