"""Spans of a prompt that stand for more than their tokens, as far as scheduling and caching read them."""

from collections.abc import Iterable
from typing import Any, Protocol


class PromptSpan(Protocol):
    """Consecutive tokens of a prompt in whose place a model reads something else; parts of the runtime have kinds."""

    @property
    def kind(self) -> str:
        """Word of its kind."""
        ...

    @property
    def start(self) -> int:
        """Position of its first token."""
        ...

    @property
    def length(self) -> int:
        """Number of its tokens."""
        ...

    @property
    def end(self) -> int:
        """Position behind its last token."""
        ...

    @property
    def whole(self) -> bool:
        """Whether no prompt chunk may end among its tokens."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of its content."""
        ...

    def as_fields(self) -> dict[str, Any]:
        """JSON fields, of which `read_span` of parts makes the span again."""
        ...

    def ids(self) -> list[int]:
        """Numbers below 0, where no token id is, that follow from its content: one for each of its tokens."""
        ...


def prefix_ids(token_ids: list[int], spans: Iterable[PromptSpan]) -> list[int]:
    """Numbers by which a prompt's blocks are hashed: token ids, and those of spans in the place of theirs."""
    ids = list(token_ids)
    for span in spans:
        ids[span.start : span.end] = span.ids()
    return ids
