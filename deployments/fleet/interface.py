"""What the HTTP surface is told of the engines behind it: their model, and why a request did not run."""

from dataclasses import dataclass, field

from wingbeat.runtime.scheduling.request import Variant


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


class RouterGone(Exception):
    """An engine has closed the connection of a router that showed no sign of life, and aborted its requests."""


class RequestRefused(ValueError):
    """No engine can ever run this request; the message says why, and begins with the field that is to blame."""


class RequestFailed(Exception):
    """Processing this request raised in its engine; the engine and its other requests go on."""


class EnginesEnded(RequestFailed):
    """Engine after engine has died, or was ended because it was stuck, while it ran this request.

    Args:
        num_engines: so many.
        last: what became of the last of them.
    """

    def __init__(self, num_engines: int, last: str) -> None:
        engines = "An engine" if num_engines == 1 else f"{num_engines} engines in a row"
        self.for_caller = f"{engines} died or had to be ended while running this request; it is not tried again."
        """In words that tell of nothing else."""
        super().__init__(f"{self.for_caller} The last one: {last}")


@dataclass(frozen=True)
class ModelInfo:
    """The served model, as far as requests are checked against it."""

    model_name: str
    """The name requests give in `model`."""
    max_model_len: int
    """Longest sequence, prompt and output together, in tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    """Of weights and KV, by torch's name."""
    drafter: str = "none"
    """One word or path for people to read."""
    remembers: bool = False
    """Whether drafts may come from other requests' texts: what of them was rejected is not the asker's to read."""
    num_spec_tokens: int = 0
    """Greatest depth of a draft tree."""
    max_num_seqs: int | None = None
    """Sequences that one engine runs at once; None where its factory does not say."""
    num_kv_tokens: int = 0
    """Tokens that the KV pool of one engine holds; 0 where its factory does not say."""
    block_size: int = 0
    """Tokens per block of the engines' prefix caches; 0 where they have none, or tell nothing of them."""
    variants: tuple[Variant, ...] = ()
    """Variants of it that are served from the start."""
    takes: dict[str, str] = field(default_factory=dict)
    """By kind of media that the model has an encoder for: `served`, or why they are not."""
    text_identity: str = ""
    """Of the settings, what decides the text; `AppConfig.text_identity`."""
