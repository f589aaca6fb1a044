"""The EAGLE-3 head: a decoder layer that continues the verifier's features. One definition for training and drafting.

Knows the forward mathematics; knows neither checkpoints nor KV caches: the caller's `attend` stores keys and values and
decides what each query may see.

Source: Li et al., EAGLE-3 (arXiv 2503.01840), section 3; `norm_output` and `fc_norm` are EAGLE-3.1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [..., T, Hq, D], key [..., T, Hkv, D], value [..., T, Hkv, D]) -> [..., T, Hq, D]; RoPE is already applied."""

Rotary = tuple[Tensor, Tensor]
"""Cosines and signed sines [..., T, 1, D] of positions."""

_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class EagleHeadConfig:
    """Shapes and conventions of a head, independent of the checkpoint format they were read from.

    Raises:
        ValueError: head counts that do not divide, or a RoPE type whose frequencies change with the context.
    """

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
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    norm_before_residual: bool = False
    """The residual is hidden_norm(features) instead of the features."""
    norm_output: bool = False
    """EAGLE-3.1: the normed hidden state is fed back."""
    fc_norm: bool = False
    """EAGLE-3.1: every tap is normed before fc."""
    attention_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} is not in 1..{self.vocab_size}")
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type not in _STATIC_ROPE_TYPES:
            raise ValueError(f"rope_type={rope_type!r} is not one of {', '.join(_STATIC_ROPE_TYPES)}")

    @property
    def num_taps(self) -> int:
        """Tapped layers."""
        return len(self.tap_layers)


class EagleHead(nn.Module):
    """An EAGLE-3 draft head. Dimension words: T tokens, H hidden_size, Ht target_hidden_size, D head_dim.

    The projections of q, k and v are one matrix, those of gate and up another: on small batches the time of a step is
    the number of its operations. `draft_token_ids` [draft_vocab_size] int64 maps draft ids to target ids.
    """

    draft_token_ids: Tensor
    signed_inv_freq: Tensor

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.num_attention_heads
        rotated = heads + config.num_key_value_heads
        self._qkv_heads = rotated + config.num_key_value_heads
        bias, eps = config.attention_bias, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(config.num_taps * config.target_hidden_size, hidden, bias=False)
        self.fc_norm = (
            nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps) for _ in config.tap_layers)
            if config.fc_norm
            else None
        )
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.qkv_proj = nn.Linear(2 * hidden, self._qkv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * config.head_dim, hidden, bias=bias)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_token_ids", torch.arange(config.draft_vocab_size))
        self.register_buffer("signed_inv_freq", torch.empty(config.head_dim), persistent=False)
        self._rope_scale = 1.0
        self.reset_rope(self.signed_inv_freq.device)

    def fuse(self, taps: Tensor) -> Tensor:
        """Taps [..., num_taps * Ht] of the target, low layer first -> features [..., H]."""
        if self.fc_norm is not None:
            parts = taps.chunk(self.config.num_taps, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)

    def rotary(self, position_ids: Tensor) -> Rotary:
        """Rotary factors of positions int64 [..., T], for `forward`."""
        # signed_inv_freq is (-f, f); cos is even and sin odd, so of rotate_half only the swap of the halves is left.
        angles = position_ids.unsqueeze(-1).unsqueeze(-1) * self.signed_inv_freq
        dtype = self.norm.weight.dtype
        return (angles.cos() * self._rope_scale).to(dtype), (angles.sin() * self._rope_scale).to(dtype)

    def forward(self, token_ids: Tensor, features: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """The layer's output, before the final norm.

        Args:
            token_ids: int64 [..., T], target ids; the token *after* the one whose features it is paired with.
            features: [..., T, H], from `fuse` (known tokens) or `feedback` (drafted tokens).
            rotary: of the positions of the features' tokens.
            attend: attention over the caller's keys and values and these.

        Returns:
            hidden [..., T, H], for `logits` and `feedback`.
        """
        config = self.config
        normed = self.hidden_norm(features)
        inputs = torch.cat([self.input_layernorm(self.embed_tokens(token_ids)), normed], dim=-1)
        qkv = self.qkv_proj(inputs).unflatten(-1, (self._qkv_heads, config.head_dim))
        rotated_heads = config.num_attention_heads + config.num_key_value_heads
        query_key = _rotate(qkv[..., :rotated_heads, :], *rotary)
        mixed = attend(
            query_key[..., : config.num_attention_heads, :],
            query_key[..., config.num_attention_heads :, :],
            qkv[..., rotated_heads:, :],
        )
        residual = normed if config.norm_before_residual else features
        hidden = residual + self.o_proj(mixed.flatten(-2))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(hidden)).chunk(2, dim=-1)
        return hidden + self.down_proj(functional.silu(gate) * up)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [..., H] of `forward` -> logits [..., draft_vocab_size] over draft ids."""
        return self.lm_head(self.norm(hidden))

    def feedback(self, hidden: Tensor) -> Tensor:
        """Hidden [..., H] of `forward` -> features [..., H] of the next drafted token."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "EagleHead":
        super()._apply(fn, recurse)
        # A change of dtype must not round the frequencies: at position 10,000 bfloat16 is off by whole turns.
        self.reset_rope(self.signed_inv_freq.device)
        return self

    def reset_rope(self, device: str | torch.device) -> None:
        """Compute the rotary frequencies anew, in float32 on `device`; needed after building on the meta device."""
        config = self.config
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(
                LlamaConfig(
                    hidden_size=config.hidden_size,
                    num_attention_heads=config.num_attention_heads,
                    head_dim=config.head_dim,
                    max_position_embeddings=config.max_position_embeddings,
                    rope_parameters=dict(config.rope_parameters),
                )
            )
            frequencies = rotary.inv_freq.float()
            signed = torch.cat([-frequencies, frequencies])
        self._rope_scale = float(rotary.attention_scaling)
        self.signed_inv_freq = signed.to(device)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    swapped = torch.cat([heads[..., half:], heads[..., :half]], dim=-1)
    return heads * cos.to(heads.dtype) + swapped * sin.to(heads.dtype)
