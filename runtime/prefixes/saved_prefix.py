"""Named prefix, as exchanged by engines, replicas and routers."""

import re
from typing import NamedTuple

from wingbeat.runtime.scheduling.prompt_spans import PromptSpan, prefix_ids
from wingbeat.runtime.scheduling.request import Variant

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class SavedPrefix(NamedTuple):
    """Definition of a named prefix."""

    name: str
    version: int
    """Nanoseconds since 1970: among prefixes of one name the latest counts."""
    token_ids: tuple[int, ...]
    variant: Variant | None = None
    """Variant whose requests use the prefix; None for the base model."""
    conversation: str = ""
    """JSON of the messages that the prefix was made of, and other inputs of their template; empty for a plain
    prompt."""
    spans: tuple[PromptSpan, ...] = ()
    """Spans of the prompt with content other than text."""

    @property
    def hashed_ids(self) -> list[int]:
        """Numbers by which the prefix's blocks are hashed: token ids, replaced by content hashes inside spans."""
        return prefix_ids(list(self.token_ids), self.spans)

    def num_blocks(self, block_size: int) -> int:
        """Whole blocks that can be computed from the prefix alone: none ends within a span, or right behind it."""
        count = len(self.token_ids) // block_size
        while any(one.start < count * block_size <= one.end for one in self.spans):
            count -= 1
        return count

    @property
    def variant_digest(self) -> str:
        """Digest of the prefix's variant; empty for the base model."""
        return "" if self.variant is None else self.variant.digest


def is_prefix_name(name: str) -> bool:
    """Whether a name is valid for a prefix and its files."""
    return _NAME.fullmatch(name) is not None
