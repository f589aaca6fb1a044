"""Limits of an engine's shapes; does not import torch."""

from pydantic import ConfigDict, Field, create_model

from wingbeat.runtime.parts import merged

PartLimits = create_model("PartLimits", **merged("graph_limits"))
"""Limits that the installed runtime parts add; each limit is also an option of the command that builds engines."""


class Limits(PartLimits):
    """Maximum sizes of an engine's stages."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_batch_size: int = Field(16, ge=1)
    """Maximum number of sequences per pass."""
    max_input_len: int = Field(512, ge=1)
    """Maximum number of prompt tokens per pass and sequence."""
    max_kv_cache_capacity: int = Field(2048, ge=1)
    """Maximum number of tokens of a sequence."""
    max_verify_tree_size: int = Field(64, ge=1)
    """Maximum number of tree nodes, including the root, that the verifier checks per sequence and round."""
    max_draft_tree_size: int = Field(64, ge=1)
    """Maximum number of tree nodes that the drafter expands per sequence."""
    max_image_tokens: int = Field(1024, ge=1)
    """Maximum number of tokens of an image, for models whose images have grids."""

    @property
    def capacity(self) -> int:
        """Number of positions of a sequence's KV row: the maximum number of tokens plus the nodes of a tree after
        them.
        """
        return self.max_kv_cache_capacity + max(self.max_verify_tree_size, self.max_draft_tree_size)
