"""Setting and sizes of the KV of layers with sliding windows, in blocks; does not import torch."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from wingbeat.runtime.config import EngineConfig

ENGINE_SETTINGS = {"num_window_blocks": (int | None, None)}
"""`num_window_blocks`: blocks of each layer with a sliding window; 0 keeps KV of whole contexts, None derives the
number from max_num_seqs and the window.
"""
ROUNDS_AHEAD = 2
"""Number of rounds whose tokens, or chunks, the host may not have settled when it prepares a round."""


def check_limits(config: "EngineConfig") -> None:
    """Raises ValueError if `num_window_blocks` is negative."""
    if (config.num_window_blocks or 0) < 0:
        raise ValueError(f"num_window_blocks is {config.num_window_blocks}: use 0 or more")


class WindowSizes(NamedTuple):
    """Numbers of blocks that layers with a sliding window need."""

    per_seq: int
    """Maximum number of blocks for a window, a tree, and the tokens of rounds in flight."""
    running: int
    """Number of blocks, with the null block, that suffice for all running sequences and their prompt chunks."""
    num_spare: int
    """Number of further windows: for cached prefixes, pinned prefixes and replays."""

    @property
    def total(self) -> int:
        """Default number of blocks."""
        return self.running + self.num_spare * self.per_seq

    @classmethod
    def of(cls, config: "EngineConfig", window: int) -> "WindowSizes":
        """Returns the sizes for an engine; `window` is the largest window in tokens."""
        size, shape = config.block_size, config.speculation
        reach = window - 1 + ROUNDS_AHEAD * shape.max_path + shape.num_nodes
        # The first and the last block of a range may hold a single position each; the third makes up for rounding.
        per_seq = min(reach // size + 3, config.max_blocks_per_seq)
        chunks = ROUNDS_AHEAD * config.max_num_batched_tokens // size + 1
        return cls(per_seq, 1 + config.max_num_seqs * per_seq + chunks, max(config.max_num_seqs // 4, 2))
