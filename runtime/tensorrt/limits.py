"""Limits of an engine's shapes. Loads no torch."""

from pydantic import ConfigDict, Field, create_model

from wingbeat.runtime.parts import merged

PartLimits = create_model("PartLimits", **merged("graph_limits"))
"""Limits of the parts that are there; options of a build too."""


class Limits(PartLimits):
    """How large the shapes of an engine's stages get."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_batch_size: int = Field(16, ge=1)
    """Sequences of one pass."""
    max_input_len: int = Field(512, ge=1)
    """Prompt tokens of one pass and sequence."""
    max_kv_cache_capacity: int = Field(2048, ge=1)
    """Tokens of the longest sequence."""
    max_verify_tree_size: int = Field(64, ge=1)
    """Tree nodes that the verifier checks per sequence and round, the root included."""
    max_draft_tree_size: int = Field(64, ge=1)
    """Tree nodes that the drafter grows from per sequence."""
    max_image_tokens: int = Field(1024, ge=1)
    """Of an image, where images have grids of their own."""

    @property
    def capacity(self) -> int:
        """Rows of a sequence's KV: its tokens, and the nodes of a tree behind them."""
        return self.max_kv_cache_capacity + max(self.max_verify_tree_size, self.max_draft_tree_size)
