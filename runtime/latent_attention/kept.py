"""KV cache of latents: a layer stores the latent of a position, and the rotated part of its key, once for all heads.

A head's key and value are products of the latent. The first product is applied to queries instead, and the second to
the attention's result (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wingbeat.runtime.fused.layers import FusedLayer, attention_of, run_trial
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.latent_attention.half import LatentHalf
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.layers.trial import alike

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LatentAttention(LayerAttention):
    """Attention of all heads to one KV head, whose values are the first elements of its keys."""

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """See `LayerAttention.stored_dims`."""
        return (self.key_dim,)

    def caches(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """See `LayerAttention.caches`."""
        return stored[0], stored[0][..., : self.value_dim]


@torch.inference_mode()
def keep_latents(loaded: LoadedModel) -> None:
    """Makes fused layers store latents, if a trial of each layer gives the same numbers."""
    if "adapters" in loaded.parts:
        logger.info("keys and values are stored per head instead of as latents, because adapters may change them")
        return
    num_kept = 0
    for index, layer in enumerate(loaded.decoder_layers):
        kept = _kept(layer, loaded.layers[index])
        if kept is not None:
            loaded.layers[index] = kept
            num_kept += 1
    if num_kept:
        logger.info("%d of %d layers store latents instead of keys and values", num_kept, len(loaded.layers))


def _kept(layer: nn.Module, attention: LayerAttention) -> LatentAttention | None:
    """Makes a layer store latents; returns None, and changes nothing, if the layer cannot."""
    half: Any = getattr(layer, "_half", None) or getattr(attention_of(layer), "_half", None)
    if not isinstance(half, LatentHalf) or not half.can_absorb:
        return None
    rank, is_whole = half.attn.kv_lora_rank, isinstance(layer, FusedLayer)
    kept = LatentAttention(attention.num_heads, 1, rank + half.attn.qk_rope_head_dim, rank, attention.sliding_window)
    expected = run_trial(layer, attention, is_whole)[0]
    half.absorb()
    if alike(run_trial(layer, kept, is_whole)[0], expected):
        return kept
    half.absorbed = None
    return None
