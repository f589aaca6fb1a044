"""Limits of an engine's shapes; does not import torch."""

from pydantic import ConfigDict, Field, create_model

from wingbeat.runtime.parts import merged

PartLimits = create_model("PartLimits", **merged("graph_limits"))
"""Limits of the installed runtime parts, which are also options of a build."""


class Limits(PartLimits):
    """Maximum sizes of an engine's stages."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_batch_size: int = Field(16, ge=1)
    """Sequences per pass."""
    max_input_len: int = Field(512, ge=1)
    """Prompt tokens per pass and sequence."""
    max_kv_cache_capacity: int = Field(2048, ge=1)
    """Tokens of the longest sequence."""
    max_verify_tree_size: int = Field(64, ge=1)
    """Tree nodes that the verifier checks per sequence and round, including the root."""
    max_draft_tree_size: int = Field(64, ge=1)
    """Tree nodes that the drafter expands per sequence."""
    max_image_tokens: int = Field(1024, ge=1)
    """Tokens of an image, for images with grids."""

    @property
    def capacity(self) -> int:
        """Positions of a sequence's KV row: its tokens, and the nodes of a tree behind them."""
        return self.max_kv_cache_capacity + max(self.max_verify_tree_size, self.max_draft_tree_size)
