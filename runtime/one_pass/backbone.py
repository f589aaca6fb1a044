"""The layers of DFlash and its successors: a block of masked slots that attends to keys and values computed from taps.

Committed positions have no residual stream: c = hidden_norm(fc(taps)) gives the keys and values of a position in every
layer, without the layer's input norm. The slots pass through the layers in the same way as tokens. Source: Chen et al.,
DFlash (arXiv 2602.06036). This module does not handle files and caches. The callers' `Attend` functions store keys and
values and determine which keys each slot sees.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.kernels.layer.reference import silu_mul
from wingbeat.runtime.heads.contract import Attend, HeadConvention, Rotary
from wingbeat.runtime.heads.layer import HeadNorm, RotaryModule
from wingbeat.runtime.heads.rotary import rotate
from wingbeat.runtime.one_pass.config import OnePassConfig, Slots
from wingbeat.runtime.one_pass.convolution import GroupedConvolution
from wingbeat.runtime.verifier.layers.linears import dense_weight


class KeyValue(NamedTuple):
    """Keys and values of some positions in one layer."""

    key: Tensor
    """Keys [..., num_key_value_heads, head_dim], with RoPE applied."""
    value: Tensor
    """Values [..., num_key_value_heads, head_dim]."""


class KeyProjection(NamedTuple):
    """A layer's key and value projection, which is a slice of the projection of all layers."""

    weight: Tensor
    """Weights [2 * num_key_value_heads * head_dim, H]."""
    bias: Tensor | None
    norm: Tensor | None
    """[head_dim]: weight of the key norm; None if keys are not normalised."""


class BlockLayer(nn.Module):
    """A Qwen3 decoder layer; its key and value projections are slices of one matrix of the head."""

    def __init__(self, config: OnePassConfig) -> None:
        super().__init__()
        hidden, size, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        heads_size = config.num_attention_heads * config.head_dim
        self.head_dim, self.num_key_value_heads, self.eps = config.head_dim, config.num_key_value_heads, eps
        self.input_layernorm = StreamNorm(hidden, eps)
        self.q_proj = nn.Linear(hidden, heads_size, bias=config.attention_bias)
        self.q_norm = StreamNorm(config.head_dim, eps) if config.qk_norm else None
        self.o_proj = nn.Linear(heads_size, hidden, bias=config.output_bias)
        self.post_attention_layernorm = StreamNorm(hidden, eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * size, bias=False)
        self.down_proj = nn.Linear(size, hidden, bias=False)
        self.sinks = nn.Parameter(torch.empty(config.num_attention_heads)) if config.sinks else None
        lattice = config.lattice
        self.attention_conv = None if lattice is None else GroupedConvolution(hidden, lattice)
        self.mlp_conv = None if lattice is None else GroupedConvolution(hidden, lattice)

    def forward(self, stream: Tensor, projection: KeyProjection, rotary: Rotary, attend: Attend) -> Tensor:
        """Returns the residual stream [num_reqs, num_slots, H] after the layer."""
        attention = partial(self._attention, projection, rotary, attend)
        stream = stream + convolved(self.attention_conv, self.input_layernorm(stream), attention)
        return stream + convolved(self.mlp_conv, self.post_attention_layernorm(stream), self._mlp)

    def _attention(self, projection: KeyProjection, rotary: Rotary, attend: Attend, inputs: Tensor) -> Tensor:
        query = self.q_proj(inputs)
        both = functional.linear(inputs, projection.weight, projection.bias)
        if getattr(attend, "in_fused_steps", False):
            norms = () if self.q_norm is None else (self.q_norm.weight, projection.norm, self.eps)
            mixed = attend.fused(torch.cat([query, both], dim=-1).unflatten(-1, (-1, self.head_dim)), rotary, norms)
            return self.o_proj(mixed.flatten(-2)).view(*inputs.shape[:-1], -1)
        query = query.unflatten(-1, (-1, self.head_dim))
        key, value = both.unflatten(-1, (2, self.num_key_value_heads, self.head_dim)).unbind(-3)
        if self.q_norm is not None:
            query = self.q_norm(query)
            key = functional.rms_norm(key, (self.head_dim,), projection.norm.to(key.dtype), self.eps)
        return self.o_proj(attend(rotate(query, *rotary), rotate(key, *rotary), value).flatten(-2))

    def _mlp(self, inputs: Tensor) -> Tensor:
        active = silu_mul(self.gate_up_proj(inputs).flatten(0, -2))
        return self.down_proj(active).view(inputs.shape)


def convolved(conv: GroupedConvolution | None, inputs: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """Runs a sublayer. If the head has DFlash2's convolutions, one convolution runs before the sublayer and one after
    it.
    """
    if conv is None:
        return sublayer(inputs)
    kernels = conv.kernels(inputs)
    return conv.over(sublayer(conv.over(inputs, kernels, 0)), kernels, 1)


class StreamNorm(HeadNorm):
    """Norm of a residual stream, whose dtype may be wider than the dtype of the weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalises [..., size]; the result has the dtype of the weight."""
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        normed = functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
        return normed.to(self.weight.dtype)


class Backbone(RotaryModule):
    """Maps taps to keys and values of the context, and a block of slots to hidden states. H is hidden_size."""

    draft_token_ids: Tensor
    """int64 [draft_vocab_size]: the target id of each draft id."""

    def __init__(self, config: OnePassConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps, kv_heads = config.hidden_size, config.rms_norm_eps, config.num_key_value_heads
        self.taps_size = config.num_taps * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(self.taps_size, hidden, bias=False)
        self.hidden_norm = StreamNorm(hidden, eps)
        # A single matrix product computes the context's keys and values for all layers. For the slots, each layer
        # multiplies by a view of the layer's own part of this matrix.
        self.kv_size = 2 * kv_heads * config.head_dim
        self.kv_proj = nn.Linear(hidden, config.num_layers * self.kv_size, bias=config.attention_bias)
        self.key_norms = nn.Parameter(torch.empty(config.num_layers, config.head_dim)) if config.qk_norm else None
        self.layers = nn.ModuleList(BlockLayer(config) for _ in config.masks)
        self.norm = StreamNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.mask_embedding = nn.Parameter(torch.empty(hidden)) if config.mask_token_id is None else None
        self.register_buffer("draft_token_ids", torch.arange(config.draft_vocab_size))
        self.register_buffer("signed_inv_freq", torch.empty(config.head_dim), persistent=False)
        self.reset_rope(self.signed_inv_freq.device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys, values and matrix products."""
        return self.hidden_norm.weight.dtype

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Layers of the target whose input is tapped."""
        return self.config.tap_layers

    @property
    def convention(self) -> HeadConvention:
        """The convention under which the weights are read."""
        return HeadConvention(self.config.tap_layers, slots=str(self.config.slots))

    def with_convention(self, convention: HeadConvention) -> Self:
        """A copy of the head, sharing its weights, under another convention.

        Raises:
            ValueError: the weights cannot be read under the convention.
        """
        if len(convention.tap_layers) != self.config.num_taps or convention.slots is None:
            raise ValueError(f"{convention}: this head has slots and reads {self.config.num_taps} taps")
        other, slots = copy.copy(self), Slots(convention.slots)
        other.config = replace(self.config, tap_layers=convention.tap_layers, slots=slots)
        return other

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.draft_token_ids.device

    def rotary(self, position_ids: Tensor) -> Rotary:
        """Rotary factors [..., T, 1, D] of positions int64 [..., T]."""
        return self.rotary_factors(position_ids.unsqueeze(-1).unsqueeze(-1) * self.signed_inv_freq)

    def fuse(self, taps: Tensor) -> Tensor:
        """Fuses the target's taps [n, taps_size], lowest layer first, into context vectors [n, H]."""
        weight = dense_weight(self.fc)
        if weight.is_cuda and weight.dtype != torch.float32:
            fused = torch.mm(taps.to(weight.dtype), weight.t(), out_dtype=torch.float32)
        else:
            fused = functional.linear(taps.to(torch.float32), weight.to(torch.float32))
        # `fc` sums over all taps. The sum may exceed the range of float16, whereas the normalised result does not.
        return self.hidden_norm(fused).to(self.dtype)

    def context(self, vectors: Tensor, rotary: Rotary) -> list[KeyValue]:
        """Keys and values [n, heads, D] of committed positions by layer, from their context vectors [n, H]."""
        config = self.config
        shape = (config.num_layers, 2, config.num_key_value_heads, config.head_dim)
        key, value = self.kv_proj(vectors).unflatten(-1, shape).unbind(-3)
        if self.key_norms is not None:
            normed = functional.rms_norm(key, (config.head_dim,), None, config.rms_norm_eps)
            key = normed * self.key_norms[:, None]
        cos, sin = (part.unsqueeze(-3) for part in rotary)
        return [KeyValue(*pair) for pair in zip(rotate(key, cos, sin).unbind(-3), value.unbind(-3), strict=True)]

    def run_block(self, anchors: Tensor, rotary: Rotary, attends: list[Attend]) -> Tensor:
        """Runs a block per request. Returns the hidden states [num_reqs, num_drafted, H] of the slots that predict a
        token; `logits` maps these states to logits.

        Args:
            anchors: int64 [num_reqs]: the last committed tokens.
            rotary: rotary factors at the slots' positions [num_reqs, block_size]; the anchor's position comes first.
            attends: attention functions, one per layer.
        """
        hidden = self.run_stream(self._embedded(anchors), rotary, attends)
        return hidden[:, self.config.first_slot :].contiguous()

    def run_stream(self, stream: Tensor, rotary: Rotary, attends: list[Attend]) -> Tensor:
        """Hidden states [num_reqs, num_slots, H] of all slots, computed from the slots' embeddings; see `run_block`."""
        if self.dtype == torch.float16:  # the residuals of trained heads exceed the range of float16
            stream = stream.to(torch.float32)
        for index, (layer, attend) in enumerate(zip(self.layers, attends, strict=True)):
            stream = layer(stream, self._projection(index), rotary, attend)
        return self.norm(stream)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [..., H] of `run_block` -> logits [..., draft_vocab_size] over draft ids."""
        logits, cap = self.lm_head(hidden), self.config.logit_softcap
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _embedded(self, anchors: Tensor) -> Tensor:
        """Inputs [num_reqs, block_size, H]: the anchor's embedding, then mask vectors."""
        masks = self.mask_vector.expand(len(anchors), self.config.block_size - 1, -1)
        return self.scaled(torch.cat([self.embed_tokens(anchors)[:, None], masks], dim=1))

    @property
    def mask_vector(self) -> Tensor:
        """The input vector [H] of a masked slot."""
        own = self.mask_embedding
        return self.embed_tokens.weight[self.config.mask_token_id] if own is None else own

    def scaled(self, embedded: Tensor) -> Tensor:
        """Embeddings multiplied by the config's embedding scale."""
        return embedded if self.config.embedding_scale == 1.0 else embedded * self.config.embedding_scale

    def _projection(self, index: int) -> KeyProjection:
        """Key and value projection of layer `index`."""
        rows = slice(index * self.kv_size, (index + 1) * self.kv_size)
        bias = None if self.kv_proj.bias is None else self.kv_proj.bias[rows]
        norm = None if self.key_norms is None else self.key_norms[index]
        return KeyProjection(dense_weight(self.kv_proj)[rows], bias, norm)
