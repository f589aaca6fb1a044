"""The interface between draft head and drafter: shapes, and the steps from taps and tokens to logits and features.

The drafter stores keys and values and grows the trees; a head has the weights and the forward pass. A new family of
heads implements this interface.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function (query [..., T, Hq, D], key [..., T, Hkv, D], value [..., T, Hkv, D]) -> [..., T, Hq, D].

RoPE is already applied to queries and keys.
"""

Rotary = tuple[Tensor, Tensor]
"""Cosines and signed sines [..., T, 1, D] of the RoPE angles at the positions of T tokens."""


class Continuations(NamedTuple):
    """Candidate tokens after the nodes of a level, for heads that do not return plain logits over the draft
    vocabulary.
    """

    logits: Tensor
    """[num_reqs, width or 1, num_candidates]; the second size is 1 if the logits are the same for all nodes."""
    token_ids: Tensor | None = None
    """int64 [num_reqs, num_candidates]: target ids of the candidates; None if the candidates are the draft
    vocabulary."""
    confidence: Tensor | None = None
    """float32 [num_reqs, width or 1]: probability that the best candidate is accepted; None if the head does not
    predict this probability.
    """
    is_tempered: bool = False
    """Whether the logits are already divided by the requests' temperatures."""


class OfParents(NamedTuple):
    """Features of a level's nodes, as rows of the previous level."""

    features: Tensor
    """[num_reqs, nodes, H]: features of the previous level."""
    parents: Tensor
    """int64 [num_reqs, width]: index of each node's features."""

    def rows(self) -> Tensor:
        """Returns the nodes' features, [num_reqs, width, H]."""
        return self.features.gather(1, self.parents[..., None].expand(-1, -1, self.features.shape[2]))


class HeadConvention(NamedTuple):
    """Choices that a checkpoint's tensors do not determine, because the tensors can be loaded and run under any
    convention.
    """

    tap_layers: tuple[int, ...]
    """Layers of the target whose *input* is tapped, ascending; num_layers means the output of the final norm."""
    norm_output: bool = False
    """EAGLE-3.1: whether the normalised hidden state is fed back."""
    norm_before_residual: bool = False
    """Whether the residual is hidden_norm(features) instead of the features."""
    rope_theta: float | None = None
    """RoPE base; None means the base in the config."""
    slots: str | None = None
    """Name of the `Slots` member that defines which position a slot of a one-pass head predicts; None without slots."""


class DraftHead(nn.Module, ABC):
    """A draft head of `num_layers` layers. Dimension names: T tokens, H hidden_size, D head_dim."""

    draft_token_ids: Tensor
    """int64 [draft_vocab_size]: the target id of each draft id."""
    hidden_size: int
    """Width of features and of hidden states."""
    num_key_value_heads: int
    head_dim: int
    value_dim: int
    """Width of an attention head's values; `head_dim` is the width of its queries and keys."""
    taps_size: int
    """Width of the taps of one position."""
    max_position_embeddings: int
    """Maximum number of positions in training, according to the checkpoint.

    Drafting at later positions is possible, but acceptance is lower.
    """
    takes_parents = False
    """Whether `forward` and `run_layers` also take features as `OfParents`, which saves a copy of the rows."""
    fused_level: Any = None
    """A `fused.levels.FusedLevel` that computes levels of a growing tree; None if `forward` and `logits` do."""
    embedding_width: int = 0
    """Width of the embeddings that the head takes in place of token embeddings in media spans; 0 if the head embeds
    token ids only.
    """

    @property
    @abstractmethod
    def convention(self) -> HeadConvention:
        """The convention under which the weights are read."""

    @abstractmethod
    def _set_convention(self, convention: HeadConvention) -> None:
        """Changes the convention under which the weights are read, in place.

        Raises:
            ValueError: the weights cannot be read under the convention; the message names the field.
        """

    def with_convention(self, convention: HeadConvention) -> Self:
        """A copy of the head that shares the weights and reads them under another convention.

        Raises:
            ValueError: the weights cannot be read under the convention.
        """
        other = copy.copy(self)
        other._set_convention(convention)
        return other

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Layers of the target that the head reads; see `HeadConvention`."""
        return self.convention.tap_layers

    @property
    def scaling(self) -> float:
        """Factor applied to query-key products."""
        return self.head_dim**-0.5

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of taps, features, keys and values."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.draft_token_ids.device

    @abstractmethod
    def fuse(self, taps: Tensor) -> Tensor:
        """Fuses the target's taps [..., taps_size], lowest layer first, into features [..., H]."""

    @abstractmethod
    def rotary(self, position_ids: Tensor) -> Rotary:
        """Rotary factors of positions int64 [..., T], for `forward`."""

    def rotary_in_grids(self, axes: Tensor) -> Rotary:
        """Rotary factors of positions on three axes, int64 [3, ..., T]. A head with one RoPE axis uses axis 0, the time
        axis.
        """
        return self.rotary(axes[0])

    def flat_rotary(self, rotated: Tensor) -> Rotary:
        """Rotary factors of flat rows at RoPE positions int64 [T], or [3, T] if some positions have three axes."""
        return self.rotary(rotated) if rotated.dim() == 1 else self.rotary_in_grids(rotated)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., T, H] of token ids int64 [..., T]; floating-point input is returned unchanged."""
        return tokens if tokens.is_floating_point() else self.embed_tokens(tokens)

    @abstractmethod
    def forward(
        self, token_ids: Tensor, features: Tensor, rotary: Rotary, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Run the layer over committed or drafted tokens.

        Args:
            token_ids: int64 [..., T], target ids. Each token comes one position *after* the token to which its features
                belong. Heads with an `embedding_width` also accept embeddings [..., T, H].
            features: [..., T, H], from `fuse` (committed tokens) or `feedback` (drafted tokens).
            rotary: rotary factors at the positions of the features' tokens.
            attend: attention function of the caller; it attends to the caller's keys and values and to the new ones of
                this call.
            rows: int64 [n], indices into flat inputs [T] whose hidden states are needed. Keys and values are computed
                for all rows, because the n rows attend to them, but `attend` gets only n queries. None means every row.

        Returns:
            hidden [..., T, H] or [n, H], for `logits` and `feedback`.
        """

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return 1

    def run_layers(
        self, token_ids: Tensor, features: Tensor, rotary: Rotary, attends: list[Attend], rows: Tensor | None = None
    ) -> Tensor:
        """As `forward`, through all layers. `attends` has an entry per layer; `rows` restricts the last layer's
        queries.
        """
        [attend] = attends
        return self(token_ids, features, rotary, attend, rows)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [..., H] of `forward` -> logits [..., draft_vocab_size] over draft ids."""

    @abstractmethod
    def feedback(self, hidden: Tensor) -> Tensor:
        """Hidden [..., H] of `forward` -> features [..., H] of the next drafted token."""
