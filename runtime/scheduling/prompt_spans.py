"""Interface of prompt spans (images, ...): the properties that scheduling and caching read."""

from collections.abc import Iterable
from typing import Any, Protocol


class PromptSpan(Protocol):
    """Consecutive prompt tokens that stand for other content, such as an image, which the model reads instead.

    Runtime parts (`runtime.parts`) define the kinds of spans.
    """

    @property
    def kind(self) -> str:
        """Name of the span's kind."""
        ...

    @property
    def start(self) -> int:
        """Position of the span's first token."""
        ...

    @property
    def length(self) -> int:
        """Number of tokens."""
        ...

    @property
    def end(self) -> int:
        """Position after the span's last token."""
        ...

    @property
    def whole(self) -> bool:
        """Whether no prompt chunk may end inside the span."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the span's content."""
        ...

    def as_fields(self) -> dict[str, Any]:
        """JSON fields from which a part's `read_span` hook recreates the span."""
        ...

    def ids(self) -> list[int]:
        """Returns one number per token, derived from the span's content.

        The numbers are negative, so they differ from all token ids.
        """
        ...


def prefix_ids(token_ids: list[int], spans: Iterable[PromptSpan]) -> list[int]:
    """Returns the numbers from which block hashes are computed: token ids, and `PromptSpan.ids` inside spans."""
    ids = list(token_ids)
    for span in spans:
        ids[span.start : span.end] = span.ids()
    return ids
