"""Interface of prompt spans (images, ...), as far as scheduling and caching read it."""

from collections.abc import Iterable
from typing import Any, Protocol


class PromptSpan(Protocol):
    """Consecutive prompt tokens in whose place a model reads other content; parts of the runtime define the kinds."""

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
        """Position behind the span's last token."""
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
        """Negative numbers, one per token, derived from the span's content; they cannot collide with token ids."""
        ...


def prefix_ids(token_ids: list[int], spans: Iterable[PromptSpan]) -> list[int]:
    """Numbers by which a prompt's blocks are hashed: token ids, replaced by `PromptSpan.ids` inside spans."""
    ids = list(token_ids)
    for span in spans:
        ids[span.start : span.end] = span.ids()
    return ids
