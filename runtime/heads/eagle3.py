"""The EAGLE-3 head: one decoder layer over the verifier's fused features; used for training and drafting.

Source: Li et al., EAGLE-3 (arXiv 2503.01840), section 3; `norm_output`, `fc_norm` and `norm_before_fc` are EAGLE-3.1.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from wingbeat.kernels.layer.draft_rows import Pairs
from wingbeat.kernels.layer.reference import MOST_HIDDEN, embed_beside
from wingbeat.runtime.heads.contract import Attend, HeadConvention, OfParents, Rotary
from wingbeat.runtime.heads.layer import DecoderHead, DecoderHeadConfig, DeeperLayer, HeadNorm


@dataclass(frozen=True)
class EagleHeadConfig(DecoderHeadConfig):
    """Shapes and conventions of an EAGLE-3 head.

    Raises:
        ValueError: as for `DecoderHeadConfig`; or both `fc_norm` and `norm_before_fc` are set.
    """

    norm_before_residual: bool = False
    """Whether the residual is hidden_norm(features) instead of the features."""
    norm_output: bool = False
    """EAGLE-3.1: whether the normalised hidden state is fed back."""
    fc_norm: bool = False
    """EAGLE-3.1: whether each tap is normalised before fc."""
    norm_before_fc: bool = False
    """EAGLE-3.1 of speculators: whether the concatenated taps are normalised before fc."""
    num_layers: int = 1
    """Number of decoder layers: the first layer reads token and features, deeper layers read the residual stream."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers < 1:
            raise ValueError(f"num_layers={self.num_layers}: a head needs at least one layer")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other")

    @property
    def kv_numbers(self) -> int:
        """See `DecoderHeadConfig.kv_numbers`."""
        return self.num_layers * super().kv_numbers

    def new_head(self) -> "EagleHead":
        """A head of this config with uninitialised weights."""
        return EagleHead(self)


class EagleHead(DecoderHead):
    """An EAGLE-3 draft head. Dimension names: T tokens, H hidden_size, Ht target_hidden_size, D head_dim."""

    config: EagleHeadConfig
    takes_parents = True

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(self.taps_size, hidden, bias=config.fc_bias)
        self.fc_norm = (
            nn.ModuleList(HeadNorm(config.target_hidden_size, eps) for _ in config.tap_layers)
            if config.fc_norm
            else None
        )
        self.input_norm = HeadNorm(self.taps_size, eps) if config.norm_before_fc else None
        self.hidden_norm = HeadNorm(hidden, eps)
        self.input_layernorm = HeadNorm(hidden, eps)
        self.norm = HeadNorm(hidden, eps)
        self.behind = nn.ModuleList(DeeperLayer(config) for _ in range(config.num_layers - 1))

    @property
    def convention(self) -> HeadConvention:
        config = self.config
        return HeadConvention(config.tap_layers, config.norm_output, config.norm_before_residual, self._theta_read)

    def _set_convention(self, convention: HeadConvention) -> None:
        if len(convention.tap_layers) != self.config.num_taps:
            raise ValueError(f"tap_layers={convention.tap_layers}: this head reads {self.config.num_taps} taps")
        self.config = replace(
            self.config,
            tap_layers=convention.tap_layers,
            norm_output=convention.norm_output,
            norm_before_residual=convention.norm_before_residual,
        )
        self._set_rope_theta(convention.rope_theta)

    def fuse(self, taps: Tensor) -> Tensor:
        """Taps [..., num_taps * Ht] of the target, lowest layer first -> features [..., H]."""
        if self.fc_norm is not None:
            by_layer = taps.chunk(self.config.num_taps, dim=-1)
            taps = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, by_layer, strict=True)], dim=-1)
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        return self.fc(taps)

    def forward(
        self,
        token_ids: Tensor,
        features: Tensor | OfParents,
        rotary: Rotary,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Returns the layer's output before the final norm; see `DraftHead.forward`."""
        table, is_normed = self.embed_tokens.weight, self.config.norm_before_residual
        given, parents = features if isinstance(features, OfParents) else (features, None)
        if not token_ids.is_floating_point() and _is_one_launch(given, table) and not torch.is_grad_enabled():
            weights, size = (self.input_layernorm.weight, self.hidden_norm.weight), given.shape[-1]
            given = given.view(-1, size) if parents is None else given
            level, fits = self.fused_level, rows is None and getattr(attend, "in_fused_steps", False)
            if level is not None and fits and token_ids.numel() <= level.most_rows:
                pairs = Pairs(token_ids.reshape(-1), table, given, parents)
                fused = level.run(pairs, rotary, attend, normed=is_normed)
                return fused.view(*token_ids.shape, size)
            flat = embed_beside(token_ids.reshape(-1), table, given, weights, self.hidden_norm.eps, parents, is_normed)
            inputs, residual = (part.view(*token_ids.shape, -1) for part in flat)
        else:
            own = given if parents is None else features.rows()
            normed = self.hidden_norm(own)
            inputs = torch.cat([self.input_layernorm(self.embed(token_ids)), normed], dim=-1)
            residual = normed if is_normed else own
        return self._layer(inputs, residual, rotary, attend, rows)

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    def run_layers(
        self,
        token_ids: Tensor,
        features: Tensor | OfParents,
        rotary: Rotary,
        attends: list[Attend],
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `DraftHead.run_layers`."""
        first, *others = [None] * len(self.behind) + [rows]
        stream = self(token_ids, features, rotary, attends[0], first)
        for layer, attend, needed in zip(self.behind, attends[1:], others, strict=True):
            stream = layer(stream, rotary, attend, needed)
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [..., H] of `forward` -> logits [..., draft_vocab_size] over draft ids."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        if self.fused_level is not None and len(rows) <= self.fused_level.most_rows and not torch.is_grad_enabled():
            return self.fused_level.logits(rows).view(*hidden.shape[:-1], -1)
        return self.lm_head(self.norm(hidden))

    def feedback(self, hidden: Tensor) -> Tensor:
        """Hidden [..., H] of `forward` -> features [..., H] of the next drafted token."""
        return self.norm(hidden) if self.config.norm_output else hidden


def _is_one_launch(features: Tensor, table: Tensor) -> bool:
    """Whether one kernel can look up embeddings in `table` and normalise them together with the features."""
    fits = features.is_contiguous() and table.is_contiguous() and features.shape[-1] <= MOST_HIDDEN
    return features.is_cuda and fits and features.dtype == table.dtype and features.shape[-1] == table.shape[1]
