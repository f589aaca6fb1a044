"""Canonical config of a head that drafts a block in one pass, independent of the checkpoint format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from wingbeat.runtime.heads.layer import check_attention
from wingbeat.runtime.one_pass.families import OnePassFamily

DEFAULT_ROPE_THETA = 1e6
"""RoPE base of Qwen3, whose layers these heads use."""
MOST_SLOTS = 1024
"""Maximum number of slots in a block; trained heads have 7 to 16."""


class Slots(StrEnum):
    """Defines which position a slot of the block predicts."""

    FILL_IN = "fill-in"
    """A slot predicts the token at its own position; the anchor's slot predicts nothing."""
    SHIFT = "shift"
    """A slot predicts the token after its position; the anchor's slot predicts the first token."""


class LayerMask(NamedTuple):
    """Defines which keys the slots see in one layer."""

    causal: bool = False
    """Whether a slot sees only itself and the slots to its left; if False, a slot sees all slots of its block. In both
    cases each slot sees the whole context within the window.
    """
    window: int | None = None
    """Window in tokens: a slot does not see keys that are at least this far before it; None means no window."""


class MarkovKind(StrEnum):
    """How a DSpark head corrects its logits depending on the previous token."""

    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


class MarkovConfig(NamedTuple):
    """Sizes of the modules of a DSpark head that run slot by slot."""

    rank: int = 0
    """Rank of the correction; 0 leaves the slots' logits unchanged."""
    kind: MarkovKind = MarkovKind.VANILLA
    has_confidence: bool = False
    confidence_reads_token: bool = True


class LatticeConfig(NamedTuple):
    """Sizes of the convolutions and the candidate selector of a DFlash2 head."""

    num_taps: int = 2
    """Number of slots that a convolution reads for a slot: the slot itself and slots to its left."""
    group_size: int = 1
    """Number of channels that share a dynamic kernel."""
    rank: int = 256
    top_k: int = 16


@dataclass(frozen=True)
class OnePassConfig:
    """Config of a head of the DFlash families, which reads taps of its target.

    Raises:
        ValueError: a size is invalid; the message names the field.
    """

    family: OnePassFamily
    slots: Slots
    block_size: int
    """Number of slots in a block, including the anchor's."""
    masks: tuple[LayerMask, ...]
    """Visibility mask of each layer."""
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    target_hidden_size: int
    tap_layers: tuple[int, ...]
    """Layers of the target whose *input* is tapped, ascending."""
    vocab_size: int
    draft_vocab_size: int
    mask_token_id: int | None
    """Token whose embedding is the input of masked slots; None if the head has a learned mask vector instead."""
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": DEFAULT_ROPE_THETA}
    )
    rotary_dim: int | None = None
    """See `DecoderHeadConfig`, which also describes `rope_interleaved`."""
    rope_interleaved: bool = False
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    """Whether the projections of q, k and v have biases."""
    output_bias: bool = False
    qk_norm: bool = True
    sinks: bool = False
    """Whether each query head has a learned logit for attending to nothing (attention sink)."""
    value_scale: float = 1.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    markov: MarkovConfig | None = None
    lattice: LatticeConfig | None = None

    def __post_init__(self) -> None:
        check_attention(self)
        if not self.first_slot < self.block_size <= MOST_SLOTS:
            raise ValueError(f"block_size={self.block_size} is not in {1 + self.first_slot}..{MOST_SLOTS}")
        if not self.masks:
            raise ValueError("num_hidden_layers=0: a head needs at least one layer")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} is outside the embedding of {self.vocab_size} rows, and there is "
                "no mask_embedding.pt"
            )
        lattice = self.lattice
        if lattice is not None and self.hidden_size % lattice.group_size:
            raise ValueError(f"conv_group_size={lattice.group_size} does not divide hidden_size={self.hidden_size}")
        if lattice is not None and not 1 <= lattice.top_k <= self.draft_vocab_size:
            raise ValueError(f"selector_top_k={lattice.top_k} is not in 1..{self.draft_vocab_size}")

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.masks)

    @property
    def num_taps(self) -> int:
        """Number of tapped layers."""
        return len(self.tap_layers)

    @property
    def first_slot(self) -> int:
        """Index of the slot that predicts the first token."""
        return 1 if self.slots is Slots.FILL_IN else 0

    @property
    def num_drafted(self) -> int:
        """Number of tokens that a block predicts."""
        return self.block_size - self.first_slot
