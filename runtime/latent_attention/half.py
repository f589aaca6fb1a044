"""The attention half of a decoder layer whose keys and values are made of a latent (DeepSeek-V2, arXiv 2405.04434)."""

from typing import Any

import torch
from torch import Tensor

from wingbeat.kernels.latent_attention.reference import Pairs, keep_latents, store_latents
from wingbeat.kernels.layer.reference import Turn
from wingbeat.runtime.fused.attention import AttentionHalf, LayerOps, ScaledHalf, norm_of
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.round.rows import Rows
from wingbeat.runtime.verifier.layers import attention as paged
from wingbeat.runtime.verifier.layers.linears import PackableLinear


class LatentHalf(AttentionHalf):
    """Joins the products of the layer's input: the queries or their latent, and the latent of keys and values."""

    order: Pairs | None = None
    """Order of the rotated elements; None leaves it to the config of the model."""
    absorbed: tuple[Tensor, Tensor] | None = None
    """Matrices [num_heads, plain, rank], for queries, and [num_heads, rank, value_dim], for results, of a layer that
    stores latents; None for a layer that stores keys and values."""

    def __init__(self, attn: Any, ops: LayerOps, attention: LayerAttention, turn: Turn) -> None:
        super().__init__(attn, ops, attention, turn)
        self.projections = (_first_of(attn), "kv_a_proj_with_mqa")
        by_config = Pairs.TO_HALVES if getattr(attn.config, "rope_interleave", False) else Pairs.HALVES
        self.pairs = self.order or by_config

    @staticmethod
    def fits(attn: Any, attention: LayerAttention) -> bool:
        """See `AttentionHalf.fits`."""
        are_alike = (getattr(attn, _first_of(attn)).bias is None) == (attn.kv_a_proj_with_mqa.bias is None)
        return are_alike and (attention.key_dim, attention.value_dim) == (attn.qk_head_dim, attn.v_head_dim)

    @property
    def can_absorb(self) -> bool:
        """Whether the products of the latent can be applied to queries and results instead."""
        return self.attn.kv_b_proj.bias is None

    def join(self) -> None:
        """See `AttentionHalf.join`."""
        super().join()
        if self.absorbed is not None:
            self.absorb()

    def take_written(self) -> None:
        """See `Joined.take_written`."""
        super().take_written()
        for held, written in zip(self.absorbed, self._matrices(), strict=True) if self.absorbed else ():
            if held.data_ptr() != written.data_ptr():  # a copy of a packed weight
                held.copy_(written)

    def absorb(self) -> None:
        """Makes the layer store latents."""
        self.absorbed = self._matrices()

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """Returns `absorbed`: views of the weight of keys and values, unless the weight is packed."""
        linear, plain = self.attn.kv_b_proj, self.attn.qk_nope_head_dim
        weight = (linear.dense_weight() if isinstance(linear, PackableLinear) else linear.weight).data
        heads = weight.unflatten(0, (self.attn.num_heads, -1))
        return heads[:, :plain], heads[:, plain:].transpose(1, 2)

    def waves(self, position_embeddings: Any, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [num_tokens, num_pairs or twice as many]."""
        cos, sin = position_embeddings
        return cos[0], sin[0]

    def __call__(self, normed: Tensor, position_embeddings: Any, rows: Rows) -> Tensor:
        """See `AttentionHalf.__call__`."""
        attn: Any = self.attn
        latents = self.qkv(normed)
        if self.add is not None:
            latents = self.add(latents, normed, 0, rows)
        sizes = [latents.shape[1] - attn.kv_lora_rank - attn.qk_rope_head_dim, attn.kv_lora_rank, attn.qk_rope_head_dim]
        query, latent, shared = latents.split(sizes, dim=1)
        if self.projections[0] == "q_proj":
            latent = attn.kv_a_layernorm(latent)
        else:
            (query_norm, eps), (norm, _) = norm_of(attn.q_a_layernorm), norm_of(attn.kv_a_layernorm)
            self.ops.norm_parts(latents, (query_norm, norm), eps)
            query = attn.q_b_proj(query)
        cos, sin = self.waves(position_embeddings, len(normed))
        cache, own = rows.caches[attn.layer_idx], rows.of_layer(attn.layer_idx)
        query = query.unflatten(-1, (attn.num_heads, -1))
        placed = cos, sin, *cache, own.slot_mapping, self.pairs
        if self.absorbed is None:
            made = attn.kv_b_proj(latent).unflatten(-1, (attn.num_heads, -1))
            query = store_latents(query, made, shared, *placed)
        else:
            query = keep_latents(query, self.absorbed[0], latent, shared, *placed)
        query = self.scaled(query, rows)
        mixed = paged.attend_segments(query, *cache, own.segments, attn.scaling, packed=own.packed)
        if self.absorbed is not None:
            latents, mixed = mixed, mixed.new_empty(*mixed.shape[:2], attn.v_head_dim)
            torch.bmm(latents.transpose(0, 1), self.absorbed[1], out=mixed.transpose(0, 1))
        return mixed.flatten(1)


class ComplexHalf(LatentHalf):
    """DeepSeek-V2's: positions are given as complex numbers, and pairs stay neighbours."""

    order = Pairs.STAY

    @staticmethod
    def position_embeddings(angles: Tensor, turn: Turn, dtype: torch.dtype) -> Any:
        """See `AttentionHalf.position_embeddings`."""
        return torch.polar(torch.ones_like(angles), angles)[None]

    def waves(self, position_embeddings: Any, num_tokens: int) -> tuple[Tensor, Tensor]:
        """See `LatentHalf.waves`."""
        cos, sin = torch.view_as_real(position_embeddings[0]).unbind(-1)
        return cos, sin


class GatedHalf(LatentHalf):
    """Ling 3's: a head's result is multiplied by a gate."""

    order = Pairs.TO_HALVES

    def __call__(self, normed: Tensor, position_embeddings: Any, rows: Rows) -> Tensor:
        """See `AttentionHalf.__call__`."""
        gate = self.attn.g_proj(normed).float().sigmoid().to(normed.dtype)
        mixed = super().__call__(normed, position_embeddings, rows)
        return (mixed.unflatten(1, (gate.shape[1], -1)) * gate[..., None]).flatten(1)


class ScaledLatentHalf(ScaledHalf, LatentHalf):
    """Mistral 4's: queries are scaled by their positions."""


class StillHalf(LatentHalf):
    """Kimi Linear's: nothing is rotated."""

    order = Pairs.STAY

    def join(self) -> None:
        """See `AttentionHalf.join`."""
        super().join()
        weight, half = self.attn.kv_a_layernorm.weight.data, self.attn.qk_rope_head_dim // 2
        self._still = weight.new_ones(1, half), weight.new_zeros(1, half)

    def waves(self, position_embeddings: Any, num_tokens: int) -> tuple[Tensor, Tensor]:
        """See `LatentHalf.waves`."""
        cos, sin = self._still
        return cos.expand(num_tokens, -1), sin.expand(num_tokens, -1)


def _first_of(attn: Any) -> str:
    """Returns the name of the projection that makes the queries, or their latent, from the layer's input."""
    return "q_proj" if getattr(attn, "q_a_proj", None) is None else "q_a_proj"


ATTENTIONS = {
    "transformers.models.axk1.modeling_axk1.AXK1Attention": LatentHalf,
    "transformers.models.bailing_hybrid.modeling_bailing_hybrid.BailingHybridAttention": GatedHalf,
    "transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2Attention": ComplexHalf,
    "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention": LatentHalf,
    "transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearAttention": StillHalf,
    "transformers.models.mistral4.modeling_mistral4.Mistral4Attention": ScaledLatentHalf,
    "transformers.models.minicpm3.modeling_minicpm3.MiniCPM3Attention": LatentHalf,
}
"""Attention modules by class name; modules of other families have the code of one of these."""
