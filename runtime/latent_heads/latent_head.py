"""An EAGLE-3 head with multi-head latent attention as in DeepSeek and Kimi (MLA, arXiv 2405.04434).

Keys and values are cached in decompressed form, per head, so that all attention kernels can read them. The cache holds
num_heads * (key_dim + value_dim) values per token; a compressed cache would hold kv_rank + rope_dim.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from wingbeat.runtime.heads.contract import Attend, Rotary
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.heads.head_config import Shapes, size_field
from wingbeat.runtime.heads.layer import HeadNorm
from wingbeat.runtime.heads.layouts import Layout
from wingbeat.runtime.heads.rotary import rotary_frequencies, rotate, turning_order


@dataclass(frozen=True)
class LatentEagleConfig(EagleHeadConfig):
    """Config of an MLA head; `head_dim` is the width of queries and keys, whose last `rope_dim` elements RoPE rotates.

    Raises:
        ValueError: as for `EagleHeadConfig`; or a size is not possible in MLA.
    """

    query_rank: int | None = None
    """Width to which queries are compressed; None means that queries are not compressed."""
    kv_rank: int = 512
    """Width to which keys and values are compressed."""
    rope_dim: int = 64
    value_dim: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("query_rank", "kv_rank", "rope_dim", "value_dim"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} is not a positive integer")
        if self.rope_dim % 2 or self.rope_dim >= self.head_dim:
            raise ValueError(f"qk_rope_head_dim={self.rope_dim} is odd, or not below head_dim {self.head_dim}")
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads}: MLA attention has keys for each of "
                f"{self.num_attention_heads} heads"
            )
        if self.num_layers != 1:
            raise ValueError(
                f"{self.num_layers} decoder layers of MLA attention: only heads with one layer are supported"
            )

    @property
    def num_frequencies(self) -> int:
        """See `DecoderHeadConfig.num_frequencies`."""
        return self.rope_dim // 2

    @property
    def rotary_width(self) -> int:
        """See `DecoderHeadConfig.rotary_width`; equals the number of rotated elements."""
        return self.rope_dim

    @property
    def kv_numbers(self) -> int:
        """See `DecoderHeadConfig.kv_numbers`."""
        return self.num_attention_heads * (self.head_dim + self.value_dim)

    def new_head(self) -> EagleHead:
        """A head of this config with uninitialised weights."""
        return LatentEagleHead(self)


def compressed_head(body: Mapping[str, Any], layout: Layout, shapes: Shapes) -> tuple[type, dict[str, Any]]:
    """Config class of an MLA head, and the fields that replace those of plain attention; raises the errors of
    `head_config`.
    """
    still, turning = size_field(body, "qk_nope_head_dim"), size_field(body, "qk_rope_head_dim")
    attention = f"{layout.layer}self_attn."
    return LatentEagleConfig, {
        "head_dim": still + turning,
        "num_key_value_heads": size_field(body, "num_attention_heads"),
        "query_rank": None if body.get("q_lora_rank") is None else size_field(body, "q_lora_rank"),
        "kv_rank": size_field(body, "kv_lora_rank"),
        "rope_dim": turning,
        "value_dim": size_field(body, "v_head_dim"),
        "rotary_dim": None,
        # DeepSeek's own tools use interleaved RoPE, which rotates neighbouring elements, so this is the default.
        "rope_interleaved": body.get("rope_interleave", True) is not False,
        "attention_bias": f"{attention}kv_a_proj_with_mqa.bias" in shapes,
        "output_bias": f"{attention}o_proj.bias" in shapes,
    }


class LatentEagleHead(EagleHead):
    """An EAGLE-3 head with MLA. Dimension names: D head_dim, R rope_dim, V value_dim, N heads."""

    config: LatentEagleConfig

    def __init__(self, config: LatentEagleConfig) -> None:
        super().__init__(config)
        self.value_dim = config.value_dim

    @property
    def scaling(self) -> float:
        """Factor of query-key products. YaRN's factor is squared, because it applies to queries and to keys."""
        rope, scale = self.config.rope_parameters, self.config.head_dim**-0.5
        all_elements = rope.get("mscale_all_dim")
        if rope.get("rope_type") != "yarn" or not all_elements or rope["factor"] <= 1:
            return scale
        return scale * (0.1 * all_elements * math.log(rope["factor"]) + 1) ** 2

    def reset_rope(self, device: str | torch.device) -> None:
        """See `DecoderHead.reset_rope`; frequencies for the rotated elements only."""
        turned = SimpleNamespace(**vars(self.config) | {"head_dim": self.config.rope_dim, "rotary_dim": None})
        signed, self._rope_scale = rotary_frequencies(turned)
        self.signed_inv_freq = signed.to(device)
        order = turning_order(turned)
        self._order = None if order is None else order.to(device)

    def _build_attention(self, width: int) -> None:
        config, heads, eps = self.config, self.config.num_attention_heads, self.config.rms_norm_eps
        queries, bias = heads * config.head_dim, config.attention_bias
        if config.query_rank is None:
            self.q_proj = nn.Linear(width, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.query_rank, bias=bias)
            self.q_a_layernorm = HeadNorm(config.query_rank, eps)
            self.q_b_proj = nn.Linear(config.query_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, config.kv_rank + config.rope_dim, bias=bias)
        self.kv_a_layernorm = HeadNorm(config.kv_rank, eps)
        both = config.head_dim - config.rope_dim + config.value_dim
        self.kv_b_proj = nn.Linear(config.kv_rank, heads * both, bias=False)
        self.o_proj = nn.Linear(heads * config.value_dim, config.hidden_size, bias=config.output_bias)

    def _layer(self, inputs: Tensor, residual: Tensor, rotary: Rotary, attend: Attend, rows: Tensor | None) -> Tensor:
        """See `DecoderHead._layer`."""
        config = self.config
        compressed, turning = self.kv_a_proj_with_mqa(inputs).split([config.kv_rank, config.rope_dim], dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(compressed.contiguous()))
        both = both.unflatten(-1, (config.num_attention_heads, -1))
        still, value = both.split([config.head_dim - config.rope_dim, config.value_dim], dim=-1)
        turned = self._turned(turning.unsqueeze(-2), rotary).expand(*still.shape[:-1], -1)
        key, query = torch.cat([still, turned], dim=-1), self._query(inputs, rotary)
        if rows is not None:
            query, residual = query[rows], residual[rows]
        return self._behind_attention(residual, attend(query, key, value.contiguous()))

    def _query(self, inputs: Tensor, rotary: Rotary) -> Tensor:
        """Queries [..., T, N, D] with RoPE applied."""
        config = self.config
        if config.query_rank is None:
            query = self.q_proj(inputs)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(inputs)))
        still, turning = query.unflatten(-1, (-1, config.head_dim)).split(
            [config.head_dim - config.rope_dim, config.rope_dim], dim=-1
        )
        return torch.cat([still, self._turned(turning, rotary)], dim=-1)

    def _turned(self, elements: Tensor, rotary: Rotary) -> Tensor:
        """Applies RoPE to elements [..., heads, R].

        The order of the returned elements may differ from that in the file, because only query-key products matter, and
        queries and keys have the same order.
        """
        return rotate(elements if self._order is None else elements[..., self._order], *rotary)
