"""A DFlash-based head in the form that CPU kernels read. The kernels compute the scores of each slot's tokens from the
taps.
"""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wingbeat.kernels.cpu.draft_structs import BlockHead, Lattice, Markov, Norm
from wingbeat.kernels.cpu.ops import CpuKernels, cpu_kernels
from wingbeat.kernels.cpu.structs import KINDS, Convolution, Heads, Layer, Matrix, layer_of
from wingbeat.runtime.cpu.heads.eagle_heads import read_eagle
from wingbeat.runtime.cpu.heads.kernel_head import KERNEL_DTYPES, AnyKernelHead, KernelHead, embedding_of
from wingbeat.runtime.cpu.layers.packed_linears import InputMajorLinear, draft_matrices, pack_draft_linear
from wingbeat.runtime.one_pass.backbone import Backbone, BlockLayer
from wingbeat.runtime.one_pass.convolution import GroupedConvolution
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.parallel_eagle import ParallelEagleHead
from wingbeat.runtime.one_pass.walks import CandidateSelector, MarkovHead


class KernelBlock(NamedTuple):
    """Addresses of a head's weights, and the objects that own the memory of these weights."""

    head: BlockHead
    layers: ctypes.Array
    held: list[object]

    @classmethod
    def from_head(cls, head: OnePassHead) -> "KernelBlock | None":
        """Packs a head's weights; None if the kernels do not support them."""
        kernels = cpu_kernels()
        if kernels is None or head.dtype not in KERNEL_DTYPES:
            return None
        if not _pack(head, kernels):
            return None
        return _Reader(head).block(head.markov, head.selector)

    def over(self, caches: list[tuple[Tensor, Tensor]]) -> BlockHead:
        """Returns the head's struct with the addresses of these KV caches. The `KernelBlock` must outlive the
        struct.
        """
        made, layers = BlockHead.from_buffer_copy(self.head), type(self.layers).from_buffer_copy(self.layers)
        for layer, cache in zip(layers, caches, strict=True):
            layer.key_cache, layer.value_cache = (tensor.data_ptr() for tensor in cache)
        made.layers = ctypes.cast(layers, ctypes.POINTER(Layer))
        self.held.append(layers)
        return made


def _pack(head: Backbone, kernels: CpuKernels) -> bool:
    """Packs all linear layers of the head, split into the parts that the kernels multiply separately. Returns whether
    all are packed.
    """
    sizes = {head.kv_proj: (head.kv_size,) * head.config.num_layers}
    for layer in head.layers:
        sizes[layer.gate_up_proj] = (head.config.intermediate_size,) * 2
    linears = [module for module in head.modules() if isinstance(module, nn.Linear)]
    return all([pack_draft_linear(linear, kernels, sizes.get(linear)) for linear in linears])


class _Reader:
    """Reads a head into structs, and collects the tensors to whose memory the structs point."""

    def __init__(self, head: Backbone) -> None:
        self.head, self.config = head, head.config
        self.held: list[object] = [head, *(tensor.data for tensor in (*head.parameters(), *head.buffers()))]
        self.held += [module.panels for module in head.modules() if isinstance(module, InputMajorLinear)]

    def block(self, markov: MarkovHead | None, selector: CandidateSelector | None) -> KernelBlock:
        head, config = self.head, self.config
        context = (Matrix * config.num_layers)(*draft_matrices(head.kv_proj))
        layers = (Layer * config.num_layers)(*(self._layer(*pair) for pair in zip(head.layers, context, strict=True)))
        causal = torch.tensor([mask.causal for mask in config.masks], dtype=torch.int64)
        mask = head.mask_embedding if config.mask_token_id is None else head.embed_tokens.weight[config.mask_token_id]
        [fused], [logits] = map(draft_matrices, (head.fc, head.lm_head))
        made = BlockHead(
            causal=causal.data_ptr(),
            num_layers=config.num_layers,
            embedding=embedding_of(head.embed_tokens.weight),
            embedding_scale=config.embedding_scale,
            mask=self._wide(mask * config.embedding_scale),
            taps_width=head.taps_size,
            fused=fused,
            context_norm=self._norm(head.hidden_norm),
            context=ctypes.cast(context, ctypes.POINTER(Matrix)),
            output_norm=self._norm(head.norm),
            logits=logits,
            logit_scale=config.logit_scale,
            logit_softcap=config.logit_softcap or 0.0,
            draft_token_ids=head.draft_token_ids.data_ptr(),
            num_slots=config.block_size,
            first_slot=config.first_slot,
        )
        if markov is not None:
            made.markov = self._markov(markov)
        if selector is not None:
            made.lattice = self._lattice(selector)
        self.held += [context, causal]
        return KernelBlock(made, layers, self.held)

    def _layer(self, layer: BlockLayer, key_value: Matrix) -> Layer:
        config, index = self.config, list(self.head.layers).index(layer)
        [query], [output], [gate, up], [down] = map(
            draft_matrices, (layer.q_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
        )
        sinks = None if layer.sinks is None else self._wide(layer.sinks)
        heads, dim = (config.num_attention_heads, config.num_key_value_heads), config.head_dim
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        made = layer_of(
            Heads(*heads, dim, dim, dim**-0.5, 0.0, config.masks[index].window or 0, sinks),
            config.hidden_size,
            config.intermediate_size,
            query_key_value=[query, key_value, Matrix()],
            output=output,
            input_norm=self._wide(norms[0].weight),
            output_norm=self._wide(norms[1].weight),
            gate=gate,
            up=up,
            down=down,
            kind=KINDS[self.head.dtype],
        )
        made.input_eps = made.output_eps = made.query_eps = config.rms_norm_eps
        if layer.q_norm is not None and self.head.key_norms is not None:
            made.query_norm = self._wide(layer.q_norm.weight)
            made.key_norm = self._wide(self.head.key_norms[index])
        if layer.attention_conv is not None and layer.mlp_conv is not None:
            made.attention_conv, made.mlp_conv = map(self._convolution, (layer.attention_conv, layer.mlp_conv))
        return made

    def _convolution(self, conv: GroupedConvolution) -> Convolution:
        [dynamic] = draft_matrices(conv.kernel_projection)
        _, num_taps, hidden = conv.base_kernel.shape
        return Convolution(self._wide(conv.base_kernel), dynamic, num_taps, hidden // conv.shape[2])

    def _markov(self, markov: MarkovHead) -> Markov:
        made = Markov(rank=markov.config.rank, confidence_reads_token=markov.config.confidence_reads_token)
        if markov.markov_w1 is not None:
            made.tokens = embedding_of(markov.markov_w1.weight)
        matrices = {
            "scores": markov.markov_w2,
            "gate": markov.gate_proj,
            "joint": markov.joint_proj,
            "confidence": markov.confidence,
        }
        for name, linear in matrices.items():
            if linear is not None:
                [matrix] = draft_matrices(linear)
                setattr(made, name, matrix)
        return made

    def _lattice(self, selector: CandidateSelector) -> Lattice:
        [projection] = draft_matrices(selector.hidden_projection)
        books = map(embedding_of, (selector.predecessor_codebook, selector.successor_codebook))
        return Lattice(*books, projection, projection.columns, selector.top_k)

    def _norm(self, norm: nn.RMSNorm) -> Norm:
        return Norm(self._wide(norm.weight), norm.eps)

    def _wide(self, tensor: Tensor) -> int:
        """Returns the address of a contiguous float32 copy of a tensor."""
        wide = tensor.detach().float().contiguous()
        self.held.append(wide)
        return wide.data_ptr()


def kernel_head(head: Any) -> AnyKernelHead | None:
    """Packs a one-pass head's weights for the kernels; None for other heads and unsupported weights."""
    read = READERS.get(type(head))
    return None if read is None else read(head)


def _read_parallel(head: ParallelEagleHead) -> KernelHead | None:
    made = read_eagle(head)
    if made is not None:
        features = head.masked_features().detach().float().contiguous()
        made.head.mask_features, made.head.mask_token = features.data_ptr(), head.mask_token_id
        made.held.append(features)
    return made


READERS = {OnePassHead: KernelBlock.from_head, ParallelEagleHead: _read_parallel}
