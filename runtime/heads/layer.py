"""The decoder layer of every EAGLE head: projections, RoPE and MLP of a Llama or Qwen layer.

Contains only the forward pass. Other modules read checkpoints; the caller's `attend` stores keys and values and
    determines which keys each query sees.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.kernels.layer.reference import add_rms_norm, rms_norm, rotations, silu_mul
from wingbeat.runtime.heads.contract import Attend, DraftHead, Rotary
from wingbeat.runtime.heads.rotary import rotary_frequencies, rotate
from wingbeat.runtime.verifier.layers.linears import add_product

DEFAULT_ROPE_THETA = 10000.0
"""RoPE base of configs that do not state one."""
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class DecoderHeadConfig:
    """Shapes and conventions of a head, independent of the checkpoint format.

    Raises:
        ValueError: a size is below 1, the number of KV heads does not divide the number of heads, or the RoPE type has
            frequencies that change with the context length.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    target_hidden_size: int
    tap_layers: tuple[int, ...]
    """Layers of the target whose *input* is tapped, ascending; num_layers means the output of the final norm.
    """
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": DEFAULT_ROPE_THETA}
    )
    rotary_dim: int | None = None
    """Number of elements of an attention head that RoPE rotates; None means all."""
    rope_interleaved: bool = False
    """Whether the weights in the file are made for RoPE that rotates neighbouring elements (interleaved) instead of the
    two halves.
    """
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    """Whether the projections of q, k and v have biases."""
    output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head, as in Qwen3."""
    fc_bias: bool = False
    mrope_section: tuple[int, ...] = ()
    """Number of frequencies for each of the three RoPE axes; empty means that all frequencies use the first axis."""
    mrope_interleaved: bool = False
    """Whether the axes alternate along the frequencies, as in Qwen3-VL; otherwise each axis has a contiguous range."""
    embeds_media: bool = True
    """Whether the head takes the verifier's embeddings in media spans instead of embedding the token ids there."""

    def __post_init__(self) -> None:
        check_attention(self)
        sections = self.mrope_section
        if sections and (len(sections) != 3 or min(sections) < 0 or sum(sections) != self.num_frequencies):
            raise ValueError(
                f"mrope_section={list(sections)} is not three counts that add up to {self.num_frequencies} frequencies"
            )

    @property
    def num_frequencies(self) -> int:
        """Number of RoPE frequencies: half the number of rotated elements of an attention head."""
        return (self.rotary_dim or self.head_dim) // 2

    @property
    def rotary_width(self) -> int:
        """Number of elements of an attention head that have a cosine and a sine: the rotated elements, and the
        unrotated elements with RoPE frequency 0.
        """
        return self.head_dim

    @property
    def num_taps(self) -> int:
        """Number of tapped layers."""
        return len(self.tap_layers)

    @property
    def kv_numbers(self) -> int:
        """Number of values that the KV cache holds per token."""
        return 2 * self.num_key_value_heads * self.head_dim


def check_attention(config: Any) -> None:
    """Check the attention sizes of a head's config.

    Raises:
        ValueError: a size is not supported; the message names the field.
    """
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} is not a positive integer")
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim} is odd: rotary position embeddings rotate two halves")
    if config.rotary_dim is not None and not (0 < config.rotary_dim <= config.head_dim and config.rotary_dim % 2 == 0):
        raise ValueError(f"rotary_dim={config.rotary_dim} is not an even number in 2..{config.head_dim}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    if not 0 < config.draft_vocab_size <= config.vocab_size:
        raise ValueError(f"draft_vocab_size={config.draft_vocab_size} is not in 1..{config.vocab_size}")
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in _STATIC_ROPE_TYPES:
        raise ValueError(f"rope_type={rope_type!r} is not one of {', '.join(_STATIC_ROPE_TYPES)}")


class DecoderLayer(nn.Module):
    """A decoder layer without the norm of its input.

    The projections of q, k and v are one matrix, and the gate and up projections another, because for small batches the
    time of a step depends on the number of operations.
    """

    config: DecoderHeadConfig
    head_dim: int

    def _build_layer(self, width: int) -> None:
        """Creates the layer's modules, for inputs [..., width] of q, k and v."""
        config, hidden = self.config, self.config.hidden_size
        self._build_attention(width)
        self.post_attention_layernorm = HeadNorm(hidden, config.rms_norm_eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)

    def _build_attention(self, width: int) -> None:
        """Creates the modules of attention: the projections of the layer's inputs [..., width] to q, k and v, the norms
        of q and k, and the output projection.
        """
        config, heads = self.config, self.config.num_attention_heads
        self._rotated_heads = heads + config.num_key_value_heads
        self._qkv_heads = self._rotated_heads + config.num_key_value_heads
        self.qkv_proj = nn.Linear(width, self._qkv_heads * config.head_dim, bias=config.attention_bias)
        self.q_norm = HeadNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = HeadNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.o_proj = nn.Linear(heads * config.head_dim, config.hidden_size, bias=config.output_bias)

    def _layer(self, inputs: Tensor, residual: Tensor, rotary: Rotary, attend: Attend, rows: Tensor | None) -> Tensor:
        """Runs attention over inputs [..., T, attention_width], then the MLP; adds each to the residual [..., T, H]."""
        if getattr(attend, "in_fused_steps", False) and not torch.is_grad_enabled():
            return self._fused_layer(inputs, residual, rotary, attend, rows)
        heads = self.config.num_attention_heads
        qkv = self.qkv_proj(inputs).unflatten(-1, (self._qkv_heads, self.head_dim))
        query_key = qkv[..., : self._rotated_heads, :]
        if self.q_norm is not None and self.k_norm is not None:
            normed = (self.q_norm(query_key[..., :heads, :]), self.k_norm(query_key[..., heads:, :]))
            query_key = torch.cat(normed, dim=-2)
        query_key = rotate(query_key, *rotary)
        query, key, value = query_key[..., :heads, :], query_key[..., heads:, :], qkv[..., self._rotated_heads :, :]
        if rows is not None:
            query, residual = query[rows], residual[rows]
        return self._behind_attention(residual, attend(query, key, value))

    def _behind_attention(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Residual [..., T, H] and attention output [..., T, heads, value_dim] -> output [..., T, H] of the layer."""
        hidden = residual + self.o_proj(mixed.flatten(-2))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(hidden)).chunk(2, dim=-1)
        return hidden + self.down_proj(functional.silu(gate) * up)

    def _fused_layer(
        self, inputs: Tensor, residual: Tensor, rotary: Rotary, attend: Attend, rows: Tensor | None
    ) -> Tensor:
        """Computes the same as `_layer`, with the fused kernels of `wingbeat.kernels.layer` and their rounding."""
        qkv = self.qkv_proj(inputs).unflatten(-1, (self._qkv_heads, self.head_dim))
        norms = () if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        mixed = self.o_proj(attend.fused(qkv, rotary, norms, rows).flatten(-2))
        residual = residual if rows is None else residual[rows]
        before = residual.reshape(-1, residual.shape[-1])
        norm = self.post_attention_layernorm
        normed, hidden = add_rms_norm(mixed, before, norm.weight, norm.eps)
        active = silu_mul(self.gate_up_proj(normed))
        return add_product(self.down_proj, hidden, active).view(residual.shape)


class DeeperLayer(DecoderLayer):
    """A decoder layer after a head's first; its only input is the residual stream, which the layer normalises."""

    def __init__(self, config: DecoderHeadConfig) -> None:
        super().__init__()
        self.config, self.head_dim = config, config.head_dim
        self.input_layernorm = HeadNorm(config.hidden_size, config.rms_norm_eps)
        self._build_layer(config.hidden_size)

    def forward(self, stream: Tensor, rotary: Rotary, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Returns the residual stream [..., T, H] after the layer, or [n, H] with `rows`; see `DraftHead.forward`."""
        return self._layer(self.input_layernorm(stream), stream, rotary, attend, rows)


class RotaryModule(nn.Module):
    """A module with the RoPE frequencies of its `config`."""

    config: Any
    dtype: torch.dtype
    signed_inv_freq: Tensor
    _rope_scale: float

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # The frequencies are recomputed, because a change of dtype must not round them. With frequencies in bfloat16,
        # the angles at position 10,000 are wrong by whole turns.
        self.reset_rope(self.signed_inv_freq.device)
        return self

    def reset_rope(self, device: str | torch.device) -> None:
        """Compute the RoPE frequencies in float32 on `device`; required after building on the meta device."""
        signed, self._rope_scale = rotary_frequencies(self.config)
        self.signed_inv_freq = signed.to(device)

    def rotary_factors(self, angles: Tensor) -> Rotary:
        """Returns cosines and sines of angles."""
        return (angles.cos() * self._rope_scale).to(self.dtype), (angles.sin() * self._rope_scale).to(self.dtype)


class DecoderHead(RotaryModule, DecoderLayer, DraftHead):
    """A head whose first decoder layer is its own modules.

    Args:
        config: shapes and conventions.
        attention_width: width of the input of q, k and v.
    """

    def __init__(self, config: DecoderHeadConfig, attention_width: int) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.hidden_size = hidden
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = self.value_dim = config.head_dim
        self.taps_size = config.num_taps * config.target_hidden_size
        self.max_position_embeddings = config.max_position_embeddings
        self.embedding_width = hidden if config.embeds_media else 0
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self._build_layer(attention_width)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_token_ids", torch.arange(config.draft_vocab_size))
        self.register_buffer("signed_inv_freq", torch.empty(config.head_dim), persistent=False)
        self._config_theta = config.rope_parameters.get("rope_theta", DEFAULT_ROPE_THETA)
        self._theta_read: float | None = None
        self.reset_rope(self.signed_inv_freq.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.post_attention_layernorm.weight.dtype

    def rotary(self, position_ids: Tensor) -> Rotary:
        # `signed_inv_freq` is (-f, f). Cosines do not depend on the sign, whereas the sines of the first half are
        # negated. The negation in rotate-half RoPE is thus part of the sines, so `rotate` only has to swap the halves.
        cos, sin = rotations(position_ids, self.signed_inv_freq, self._rope_scale, self.dtype, halves=1)
        return cos.unsqueeze(-2), sin.unsqueeze(-2)

    def rotary_in_grids(self, axes: Tensor) -> Rotary:
        if not self.config.mrope_section:
            return super().rotary_in_grids(axes)
        axis_of = torch.tensor(frequency_axes(self.config) * 2, device=axes.device)
        return self.rotary_factors((axes[axis_of].movedim(0, -1) * self.signed_inv_freq).unsqueeze(-2))

    def _set_rope_theta(self, theta: float | None) -> None:
        """Sets the RoPE base; None means the config's base. Other heads that share these weights keep their RoPE
        base.
        """
        self._theta_read = theta
        rope = {**self.config.rope_parameters, "rope_theta": self._config_theta if theta is None else theta}
        self.config = replace(self.config, rope_parameters=rope)
        self._buffers = dict(self._buffers)
        self.reset_rope(self.signed_inv_freq.device)


def frequency_axes(config: DecoderHeadConfig) -> list[int]:
    """RoPE axis (0 to 2) of each pair of elements of an attention head, as in transformers' Qwen2.5-VL and Qwen3-VL.

    Unrotated pairs have axis 0.
    """
    sections, still = config.mrope_section, [0] * (config.rotary_width // 2 - config.num_frequencies)
    if not config.mrope_interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)] + still
    axes = [0] * sum(sections)
    for axis in (1, 2):
        taken = slice(axis, 3 * sections[axis], 3)
        axes[taken] = [axis] * len(axes[taken])
    return axes + still


class HeadNorm(nn.RMSNorm):
    """RMS norm that uses a fused kernel on GPUs when no gradients are needed."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalises [..., size] along the last dimension."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(x)
        return rms_norm(x, self.weight, self.eps)
