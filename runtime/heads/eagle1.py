"""The EAGLE-1 head, whose weights EAGLE-2 also uses. The head predicts the verifier's last hidden state at the next
position.

The predicted state is projected by the verifier's own output matrix and fed back as the feature of the next position.
Source: Li et al., EAGLE (arXiv 2401.15077), section 3.1, and EAGLE-2 (arXiv 2406.16858) for the trees.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wingbeat.runtime.heads.contract import Attend, HeadConvention, Rotary
from wingbeat.runtime.heads.layer import DecoderHead, DecoderHeadConfig


@dataclass(frozen=True)
class Eagle1HeadConfig(DecoderHeadConfig):
    """Config of an EAGLE-1 head, which has its target's hidden size and whole vocabulary, and a single tap after the
    target's final norm.

    Raises:
        ValueError: as for `DecoderHeadConfig`; or the width, the vocabulary or the number of taps is not that of an
            EAGLE-1 head.
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
        """A head of this config with uninitialised weights."""
        return Eagle1Head(self)


class Eagle1Head(DecoderHead):
    """An EAGLE-1 draft head. Dimension names: T tokens, H hidden_size.

    Features are the target's unchanged hidden states. `fc` joins each feature with the embedding of its token, for
    committed and drafted tokens alike. `lm_head` is the target's output matrix.
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
        """Returns the target's last hidden states [..., H] unchanged: they are the features."""
        return taps

    def forward(
        self, token_ids: Tensor, features: Tensor, rotary: Rotary, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Returns the predicted hidden states; see `DraftHead.forward`. The layer's input is not normalised."""
        # Under autocast `fc` returns bfloat16; the conversion keeps the residual stream in the features' precision.
        joined = self.fc(torch.cat([self.embed(token_ids), features], dim=-1)).to(features.dtype)
        return self._layer(joined, joined, rotary, attend, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [..., H] -> logits [..., vocab_size] by the target's output matrix."""
        return self.lm_head(hidden)

    def feedback(self, hidden: Tensor) -> Tensor:
        """Returns the predicted hidden states unchanged: they are the next features."""
        return hidden
