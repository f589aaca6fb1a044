"""Operators of the exported graphs that torch does not export itself: ONNX operators for attention, KV writes and RoPE.

If an opset lacks an operator, or TensorRT does not support the operator in a dtype, the same computation is exported as
several simpler operators.
"""

import torch
from torch import Tensor
from torch.onnx.ops import symbolic

OPSETS = (24, 23, 18)
"""Supported opsets, newest first: 24 has TensorScatter; 23 has Attention, RotaryEmbedding and RMSNormalization; 18 has
none of these."""
SCATTER_OPSET, ATTENTION_OPSET = 24, 23


class GraphOps:
    """Operators of one export.

    Args:
        opset: one of OPSETS.
        dtype: dtype of weights and KV. TensorRT builds the Attention operator only in float16 and bfloat16; in float32
            it is decomposed.

    Raises:
        ValueError: the opset is not supported.
    """

    def __init__(self, opset: int, dtype: torch.dtype) -> None:
        if opset not in OPSETS:
            raise ValueError(f"opset is {opset}: use one of {', '.join(map(str, OPSETS))}")
        self.opset = opset
        self.native_attention = opset >= ATTENTION_OPSET and dtype != torch.float32
        self.native_rope = opset >= ATTENTION_OPSET
        self.native_scatter = opset >= SCATTER_OPSET

    def scatter(self, cache: Tensor, update: Tensor, start: Tensor) -> Tensor:
        """Write new rows to a cache; returns the new cache.

        Args:
            cache: [batch, heads, capacity, dim].
            update: [batch, heads, rows, dim], the rows to write.
            start: int64 [batch], position of the first new row.
        """
        if self.native_scatter:
            attributes = {"axis": -2, "mode": "linear"}
            return symbolic(
                "TensorScatter",
                (cache, update, start),
                attributes,
                dtype=cache.dtype,
                shape=cache.shape,
                version=self.opset,
            )
        rows = start[:, None] + torch.arange(update.shape[2], device=start.device)
        return cache.scatter(2, rows[:, None, :, None].expand(update.shape), update)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float | None = None
    ) -> Tensor:
        """Attention over whole caches.

        Args:
            query: [batch, num_heads, rows, key_dim].
            key: [batch, num_kv_heads, capacity, key_dim].
            value: [batch, num_kv_heads, capacity, value_dim].
            mask: bool [batch, 1, rows, capacity], the keys that each row sees.
            scaling: factor of query-key products.
            softcap: limit of the scores; None for no limit.

        Returns:
            [batch, num_heads, rows, value_dim].
        """
        num_heads, num_kv_heads, dim = query.shape[1], key.shape[1], value.shape[3]
        if self.native_attention and key.shape[3] == dim:  # TensorRT requires keys and values of equal width
            attributes = {"scale": float(scaling)} | ({} if softcap is None else {"softcap": float(softcap)})
            return symbolic(
                "Attention",
                (query, key, value, mask),
                attributes,
                dtype=query.dtype,
                shape=(*query.shape[:3], dim),
                version=self.opset,
            )
        query = query.unflatten(1, (num_kv_heads, num_heads // num_kv_heads)) * scaling
        scores = query @ key[:, :, None].transpose(-1, -2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask[:, :, None], torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores.float(), dim=-1).to(value.dtype)
        return (weights @ value[:, :, None]).flatten(1, 2)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate-half RoPE of heads [batch, heads, rows, dim], with cos and sin [batch, rows, dim]."""
        half = heads.shape[-1] // 2
        if self.native_rope:
            inputs = (heads, cos[..., :half], sin[..., :half])
            return symbolic("RotaryEmbedding", inputs, dtype=heads.dtype, shape=heads.shape, version=self.opset)
        swapped = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
        return heads * cos[:, None] + swapped * sin[:, None]
