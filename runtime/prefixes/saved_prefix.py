"""A saved prefix with its name, in the form in which engines, replicas and routers exchange prefixes."""

import re
from typing import NamedTuple

from wingbeat.runtime.scheduling.prompt_spans import PromptSpan, prefix_ids
from wingbeat.runtime.scheduling.request import Variant

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class SavedPrefix(NamedTuple):
    """Definition of a named prefix."""

    name: str
    version: int
    """Version, in nanoseconds since 1970. If several prefixes have the same name, the prefix with the highest version
    is valid."""
    token_ids: tuple[int, ...]
    variant: Variant | None = None
    """Variant whose requests use the prefix; None for the base model."""
    conversation: str = ""
    """JSON of the messages from which the prefix was made, with other inputs of the chat template; empty for a plain
    prompt."""
    spans: tuple[PromptSpan, ...] = ()
    """Spans of the prompt with content other than text."""

    @property
    def hashed_ids(self) -> list[int]:
        """Numbers from which block hashes are computed: token ids, and content hashes inside spans."""
        return prefix_ids(list(self.token_ids), self.spans)

    def num_blocks(self, block_size: int) -> int:
        """Returns the number of whole blocks that can be computed from the prefix alone.

        The last of these blocks does not end within a span or directly after a span.
        """
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
