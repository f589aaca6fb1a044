"""An EAGLE head in the form that CPU kernels read. The kernels compute logits of the draft vocabulary from tokens and
taps.
"""

import ctypes
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from wingbeat.kernels.cpu.draft_structs import BlockHead, Embedding, Head, Norm
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.kernels.cpu.structs import KINDS, Heads, Layer, Matrix, layer_of
from wingbeat.runtime.cpu.layers.packed_linears import InputMajorLinear, draft_matrices, pack_draft_linear
from wingbeat.runtime.heads.layer import DecoderHead

KERNEL_DTYPES = (torch.float32, torch.bfloat16)
"""Weight dtypes that the kernels read."""


class AnyKernelHead(Protocol):
    """Addresses of a head's weights, which the kernels read to draft."""

    def over(self, caches: list[tuple[Tensor, Tensor]]) -> Head | BlockHead:
        """Returns the head's struct with the addresses of these KV caches, one (key, value) pair per layer."""
        ...


class KernelHead(NamedTuple):
    """Addresses of a head's weights, and the objects that own the memory of these weights."""

    head: Head
    behind: list[Layer]
    """Decoder layers after the first."""
    held: list[object]

    @classmethod
    def from_layers(cls, head: DecoderHead, behind: Iterable[nn.Module] = ()) -> "KernelHead | None":
        """Reads layers, embedding and output head of a draft head, and packs its weights.

        The caller must add the fields that are specific to the head's family.

        Args:
            behind: layers after the first.

        Returns:
            None if the kernels do not support the weights.
        """
        kernels, held = (
            cpu_kernels(),
            [head, head.draft_token_ids, *(parameter.data for parameter in head.parameters())],
        )
        layers = [_layer_of(head, held, layer) for layer in (None, *behind)]
        if None in layers or not all([pack_draft_linear(linear, kernels) for linear in (head.fc, head.lm_head)]):
            return None
        [logits] = draft_matrices(head.lm_head)
        made = Head(
            layer=layers[0],
            embedding=embedding_of(head.embed_tokens.weight),
            num_taps=head.config.num_taps,
            tap_width=head.config.target_hidden_size,
            logits=logits,
            draft_token_ids=head.draft_token_ids.data_ptr(),
            num_behind=len(layers) - 1,
        )
        held += [module.panels for module in head.modules() if isinstance(module, InputMajorLinear)]
        return cls(made, layers[1:], held)

    def norm(self, norm: nn.RMSNorm) -> Norm:
        """Reads one of the head's norms into a struct."""
        return Norm(_wide(norm, self.held), norm.eps)

    def over(self, caches: list[tuple[Tensor, Tensor]]) -> Head:
        """Returns the head's struct with the addresses of these KV caches, one (key, value) pair per layer."""
        made, behind = Head.from_buffer_copy(self.head), (Layer * len(self.behind))(*self.behind)
        for layer, cache in zip([made.layer, *behind], caches, strict=True):
            layer.key_cache, layer.value_cache = (tensor.data_ptr() for tensor in cache)
        made.behind = ctypes.cast(behind, ctypes.POINTER(Layer))
        self.held.append(behind)
        return made


def embedding_of(weight: Tensor) -> Embedding:
    """Reads an embedding [num_tokens, size] of a dtype in `KINDS`; the caller must keep the tensor alive."""
    return Embedding(weight.data_ptr(), *weight.stride(), len(weight), KINDS[weight.dtype])


def _layer_of(head: DecoderHead, held: list[object], behind: nn.Module | None = None) -> Layer | None:
    """Reads a layer and packs its weights. Returns None unless the weights are frozen, on the CPU and of a dtype in
    `KERNEL_DTYPES`.

    Args:
        held: list to which the objects are added that own the layer's memory; the head's parameters are not added.
        behind: a layer after the head's first layer, with the first layer's shapes and its own input norm. None reads
            the head's first layer.
    """
    config, size, kernels = head.config, head.config.intermediate_size, cpu_kernels()
    heads, num_kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    source = head if behind is None else behind
    linears = {source.qkv_proj: None, source.o_proj: None, source.gate_up_proj: (size, size), source.down_proj: None}
    if kernels is None or head.dtype not in KERNEL_DTYPES:
        return None
    if not all([pack_draft_linear(linear, kernels, sizes) for linear, sizes in linears.items()]):
        return None
    [qkv], [output], [gate, up], [down] = map(draft_matrices, linears)
    norm = source.post_attention_layernorm
    layer = layer_of(
        Heads(heads, num_kv_heads, dim, dim, head.scaling, 0.0, 0, None),
        config.hidden_size,
        size,
        query_key_value=[qkv, Matrix(), Matrix()],
        output=output,
        output_norm=_wide(norm, held),
        output_eps=norm.eps,
        gate=gate,
        up=up,
        down=down,
        kind=KINDS[head.dtype],
    )
    layer.inputs = source.qkv_proj.in_features
    if source.q_norm is not None and source.k_norm is not None:
        layer.query_norm, layer.key_norm = (_wide(norm, held) for norm in (source.q_norm, source.k_norm))
        layer.query_eps = source.q_norm.eps
    if behind is not None:
        norm = source.input_layernorm
        layer.input_norm, layer.input_eps = _wide(norm, held), norm.eps
    return layer


def _wide(norm: nn.RMSNorm, held: list[object]) -> int:
    """Returns the address of a norm's weight in float32."""
    wide = norm.weight.detach().float()
    held.append(wide)
    return wide.data_ptr()
