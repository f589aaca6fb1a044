"""A prefix under its name, as engines, replicas and routers know it."""

import re
from typing import NamedTuple

from wingbeat.runtime.scheduling.prompt_spans import PromptSpan, prefix_ids
from wingbeat.runtime.scheduling.request import Variant

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class SavedPrefix(NamedTuple):
    """What a name stands for."""

    name: str
    version: int
    """Nanoseconds since 1970: of two prefixes of one name the later one counts."""
    token_ids: tuple[int, ...]
    variant: Variant | None = None
    """The variant for whose requests it is; None is the base model."""
    conversation: str = ""
    """JSON of the messages that it was made of, and of what else their template read; empty for a plain prompt."""
    spans: tuple[PromptSpan, ...] = ()
    """Spans among its tokens that stand for more than text."""

    @property
    def hashed_ids(self) -> list[int]:
        """Numbers by which its blocks are hashed: tokens, and the content of spans in the place of theirs."""
        return prefix_ids(list(self.token_ids), self.spans)

    def num_blocks(self, block_size: int) -> int:
        """Whole blocks that can be computed of it alone: none ends within a span, or right behind it."""
        count = len(self.token_ids) // block_size
        while any(one.start < count * block_size <= one.end for one in self.spans):
            count -= 1
        return count

    @property
    def variant_digest(self) -> str:
        """Digest of its variant; empty for the base model."""
        return "" if self.variant is None else self.variant.digest


def is_prefix_name(name: str) -> bool:
    """Whether a prefix may have this name, which is also that of its files."""
    return _NAME.fullmatch(name) is not None
