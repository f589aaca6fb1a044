"""Rotary position embeddings of heads: frequencies, and rotate-half RoPE.

If a head rotates only part of its elements, or neighbouring pairs of elements, its weights are permuted at load time,
so that this code and all kernels can use rotate-half RoPE. Query-key products stay the same, because queries and keys
are permuted in the same way.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class Turned(Protocol):
    """The fields of a head's config that `turning_order` reads."""

    @property
    def head_dim(self) -> int: ...

    @property
    def rotary_dim(self) -> int | None: ...

    @property
    def rope_interleaved(self) -> bool: ...


def rotary_frequencies(config: Any) -> tuple[Tensor, float]:
    """A head's RoPE frequencies f as (-f, f), float32 [head_dim] on the host, and the factor by which cosines and sines
    are multiplied.

    Unrotated elements have frequency 0.
    """
    turned = config.rotary_dim or config.head_dim
    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=turned,
                num_attention_heads=1,
                head_dim=turned,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
        )
        frequencies = functional.pad(rotary.inv_freq.float(), (0, (config.head_dim - turned) // 2))
        return torch.cat([-frequencies, frequencies]), float(rotary.attention_scaling)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [..., T, heads, D] by cosines and signed sines [..., T, 1, D]."""
    half = heads.shape[-1] // 2
    swapped = torch.cat([heads[..., half:], heads[..., :half]], dim=-1)
    return heads * cos.to(heads.dtype) + swapped * sin.to(heads.dtype)


def turning_order(config: Turned) -> Tensor | None:
    """int64 [head_dim]: the permutation from a file's element order to the order of rotate-half RoPE; None if the two
    orders are equal.
    """
    dim, turned = config.head_dim, config.rotary_dim or config.head_dim
    elements = torch.arange(dim, device="cpu")
    pairs = elements[:turned].view(-1, 2).t() if config.rope_interleaved else elements[:turned].view(2, -1)
    order = torch.cat([pairs, elements[turned:].view(2, -1)], dim=1).flatten()
    return None if torch.equal(order, elements) else order


def in_turning_order(state: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Permute the query and key rows and norms in an EAGLE head's state dict from the file's order to the order of
    rotate-half RoPE.
    """
    order = turning_order(config)
    if order is None:
        return dict(state)
    heads = config.num_attention_heads + config.num_key_value_heads

    def arranged(name: str, tensor: Tensor) -> Tensor:
        module = name.split(".")[-2] if "." in name else ""
        if module in ("q_norm", "k_norm"):
            return tensor[order]
        if module != "qkv_proj":
            return tensor
        parts = tensor.unflatten(0, (-1, config.head_dim))
        return torch.cat([parts[:heads, order], parts[heads:]]).flatten(0, 1)

    return {name: arranged(name, tensor) for name, tensor in state.items()}
