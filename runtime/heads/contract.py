"""The contract between a draft head and its drafter: shapes, and steps from taps and tokens to logits and features.

The drafter owns keys, values and trees; a head owns weights and mathematics. Heads of other checkpoints' families fit
in by implementing this contract.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [..., T, Hq, D], key [..., T, Hkv, D], value [..., T, Hkv, D]) -> [..., T, Hq, D]; RoPE is already applied."""

Rotary = tuple[Tensor, Tensor]
"""Cosines and signed sines [..., T, 1, D] of positions."""


class Continuations(NamedTuple):
    """Candidates behind the nodes of a level, for heads that yield more, or less, than logits over the vocabulary."""

    logits: Tensor
    """[num_reqs, width or 1, num_candidates]; 1 where it is the same for all nodes."""
    token_ids: Tensor | None = None
    """int64 [num_reqs, num_candidates]: the candidates' target ids; None where they are the draft vocabulary."""
    confidence: Tensor | None = None
    """float32 [num_reqs, width or 1]: how likely the best candidate is to be accepted, where the head says that."""
    is_tempered: bool = False
    """The logits are divided by the requests' temperatures already."""


class HeadConvention(NamedTuple):
    """Choices that a checkpoint's tensors do not show: read one way or the other, the tensors fit and run."""

    tap_layers: tuple[int, ...]
    """Layers of the target whose *input* is tapped, ascending; the number of layers stands for the output of the final
    norm."""
    norm_output: bool = False
    """EAGLE-3.1: the normed hidden state is fed back."""
    norm_before_residual: bool = False
    """The residual is hidden_norm(features) instead of the features."""
    rope_theta: float | None = None
    """Base of the rotary frequencies, where it is not the one of the config."""
    slots: str | None = None
    """Position that a slot of a one-pass head predicts, by the name of `Slots`; None for heads without slots."""


class DraftHead(nn.Module, ABC):
    """A head over keys and values of `num_layers` layers. Dimension words: T tokens, H hidden_size, D head_dim."""

    draft_token_ids: Tensor
    """int64 [draft_vocab_size]: the target id of each draft id."""
    hidden_size: int
    """Width of features and of hidden states."""
    num_key_value_heads: int
    head_dim: int
    value_dim: int
    """Width of a head's values, where `head_dim` is that of its queries and keys."""
    taps_size: int
    """Width of the taps of one position."""
    max_position_embeddings: int
    """Positions it was trained for, as far as its checkpoint says; further ones run, with worse drafts."""
    embedding_width: int = 0
    """Width of the embeddings of spans that are read in the place of their tokens'; 0 reads the tokens'."""

    @property
    @abstractmethod
    def convention(self) -> HeadConvention:
        """How its weights are read."""

    @abstractmethod
    def _set_convention(self, convention: HeadConvention) -> None:
        """Read the weights otherwise.

        Raises:
            ValueError: the weights cannot be read so; the message names the field.
        """

    def with_convention(self, convention: HeadConvention) -> Self:
        """The same weights, shared, read another way.

        Raises:
            ValueError: the weights cannot be read so.
        """
        other = copy.copy(self)
        other._set_convention(convention)
        return other

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Layers of the target it reads; see `HeadConvention`."""
        return self.convention.tap_layers

    @property
    def scaling(self) -> float:
        """Factor on the products of queries and keys."""
        return self.head_dim**-0.5

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of taps, features, keys and values."""

    @property
    def device(self) -> torch.device:
        """Where it drafts."""
        return self.draft_token_ids.device

    @abstractmethod
    def fuse(self, taps: Tensor) -> Tensor:
        """Taps [..., taps_size] of the target, low layer first -> features [..., H]."""

    @abstractmethod
    def rotary(self, position_ids: Tensor) -> Rotary:
        """Rotary factors of positions int64 [..., T], for `forward`."""

    def rotary_in_grids(self, axes: Tensor) -> Rotary:
        """Rotary factors of positions on three axes, int64 [3, ..., T]; heads of one axis turn by the first, time."""
        return self.rotary(axes[0])

    def turned(self, rotated: Tensor) -> Rotary:
        """Rotary factors of rows side by side, by int64 [T], or by [3, T] where some lie in grids."""
        return self.rotary(rotated) if rotated.dim() == 1 else self.rotary_in_grids(rotated)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., T, H] of token ids int64 [..., T]; embeddings stay what they are."""
        return tokens if tokens.is_floating_point() else self.embed_tokens(tokens)

    @abstractmethod
    def forward(
        self, token_ids: Tensor, features: Tensor, rotary: Rotary, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Pass over known or drafted tokens.

        Args:
            token_ids: int64 [..., T], target ids; the token *after* the one whose features it is paired with. Or what
                stands for their embeddings [..., T, H], in heads with a `embedding_width`.
            features: [..., T, H], from `fuse` (known tokens) or `feedback` (drafted tokens).
            rotary: of the positions of the features' tokens.
            attend: attention over the caller's keys and values and these.
            rows: int64 [n], of flat inputs [T]: those whose hidden states are needed. All keys and values are computed,
                since others attend to them, and `attend` gets n queries. None needs every row.

        Returns:
            hidden [..., T, H] or [n, H], for `logits` and `feedback`.
        """

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return 1

    def run_layers(
        self, token_ids: Tensor, features: Tensor, rotary: Rotary, attends: list[Attend], rows: Tensor | None = None
    ) -> Tensor:
        """`forward` through every layer; `attends` are by layer, and `rows` cut the last one's queries alone."""
        [attend] = attends
        return self(token_ids, features, rotary, attend, rows)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [..., H] of `forward` -> logits [..., draft_vocab_size] over draft ids."""

    @abstractmethod
    def feedback(self, hidden: Tensor) -> Tensor:
        """Hidden [..., H] of `forward` -> features [..., H] of the next drafted token."""
