"""The attention half of a decoder layer whose keys and values are made of a latent (DeepSeek-V2, arXiv 2405.04434)."""

from typing import Any

from torch import Tensor

from wingbeat.kernels.latent_attention.reference import store_latents
from wingbeat.kernels.layer.reference import Turn
from wingbeat.runtime.fused.attention import AttentionHalf, LayerOps, norm_of
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.round.rows import Rows
from wingbeat.runtime.verifier.layers import attention as paged


class LatentHalf(AttentionHalf):
    """Joins the products of the layer's input: the queries or their latent, and the latent of keys and values."""

    def __init__(self, attn: Any, ops: LayerOps, attention: LayerAttention, turn: Turn) -> None:
        super().__init__(attn, ops, attention, turn)
        self.projections = ("q_proj" if attn.q_a_proj is None else "q_a_proj", "kv_a_proj_with_mqa")

    @staticmethod
    def fits(attn: Any, attention: LayerAttention) -> bool:
        """See `AttentionHalf.fits`."""
        first = attn.q_proj if attn.q_a_proj is None else attn.q_a_proj
        are_alike = (first.bias is None) == (attn.kv_a_proj_with_mqa.bias is None)
        return are_alike and (attention.key_dim, attention.value_dim) == (attn.qk_head_dim, attn.v_head_dim)

    def __call__(self, normed: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, rows: Rows) -> Tensor:
        """See `AttentionHalf.__call__`."""
        attn: Any = self.attn
        latents = self.qkv(normed)
        if self.add is not None:
            latents = self.add(latents, normed, 0, rows)
        sizes = [latents.shape[1] - attn.kv_lora_rank - attn.qk_rope_head_dim, attn.kv_lora_rank, attn.qk_rope_head_dim]
        query, latent, shared = latents.split(sizes, dim=1)
        if attn.q_a_proj is None:
            latent = attn.kv_a_layernorm(latent)
        else:
            (query_norm, eps), (norm, _) = norm_of(attn.q_a_layernorm), norm_of(attn.kv_a_layernorm)
            self.ops.norm_parts(latents, (query_norm, norm), eps)
            query = attn.q_b_proj(query)
        made = attn.kv_b_proj(latent)
        cos, sin = (part[0] for part in position_embeddings or ())
        cache, own = rows.caches[attn.layer_idx], rows.of_layer(attn.layer_idx)
        heads = [part.unflatten(-1, (attn.num_heads, -1)) for part in (query, made)]
        query = store_latents(*heads, shared, cos, sin, *cache, own.slot_mapping, attn.config.rope_interleave)
        return paged.attend_segments(query, *cache, own.segments, attn.scaling, packed=own.packed).flatten(1)


ATTENTIONS = {"transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention": LatentHalf}
"""Attention modules by class name; modules of other families have the code of one of these."""
