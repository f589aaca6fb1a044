"""The EAGLE-1 head, whose weights EAGLE-2 drafts trees with: it predicts the verifier's next last hidden state.

What it makes is read by the verifier's own output matrix and is fed back as the next position's feature.

Source: Li et al., EAGLE (arXiv 2401.15077), section 3.1, and EAGLE-2 (arXiv 2406.16858) for the trees.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wingbeat.runtime.heads.contract import Attend, HeadConvention, Rotary
from wingbeat.runtime.heads.layer import DecoderHead, DecoderHeadConfig


@dataclass(frozen=True)
class Eagle1HeadConfig(DecoderHeadConfig):
    """An EAGLE-1 head's shapes: as wide as its target, over the whole vocabulary, one tap behind the final norm.

    Raises:
        ValueError: see `DecoderHeadConfig`; or a width, vocabulary or number of taps that no EAGLE-1 head has.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size={self.hidden_size} of an EAGLE-1 head differs from the target's {self.target_hidden_size}"
            )
        if self.draft_vocab_size != self.vocab_size:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size}: an EAGLE-1 head drafts all {self.vocab_size}")
        if self.num_taps != 1:
            raise ValueError(f"tap_layers={self.tap_layers}: an EAGLE-1 head has one tap, the final norm's output")

    def new_head(self) -> "Eagle1Head":
        """Head of this config, its weights not set yet."""
        return Eagle1Head(self)


class Eagle1Head(DecoderHead):
    """An EAGLE-1 draft head. Dimension words: T tokens, H hidden_size.

    `forward` takes the pair of token and feature apart: features are the target's hidden states as they are, and `fc`
    joins them with the token's embedding in known and in drafted steps alike. `lm_head` is the target's.
    """

    config: Eagle1HeadConfig

    def __init__(self, config: Eagle1HeadConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)

    @property
    def convention(self) -> HeadConvention:
        return HeadConvention(self.config.tap_layers)

    def _set_convention(self, convention: HeadConvention) -> None:
        if convention != self.convention:
            raise ValueError(f"{convention}: an EAGLE-1 head can only be read as {self.convention}")

    def fuse(self, taps: Tensor) -> Tensor:
        """The target's last hidden states [..., H], which are the features."""
        return taps

    def forward(
        self, token_ids: Tensor, features: Tensor, rotary: Rotary, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """The predicted hidden states; see `DraftHead.forward`. The layer's input is not normed."""
        # Under autocast fc gives bfloat16; the residual stream stays in the features' precision.
        joined = self.fc(torch.cat([self.embed(token_ids), features], dim=-1)).to(features.dtype)
        return self._layer(joined, joined, rotary, attend, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [..., H] -> logits [..., vocab_size] by the target's output matrix."""
        return self.lm_head(hidden)

    def feedback(self, hidden: Tensor) -> Tensor:
        """The predicted hidden states are the next features."""
        return hidden
