"""An EAGLE head as the CPU's kernels read it: from tokens and taps to the logits of the draft vocabulary."""

import ctypes
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from wingbeat.kernels.cpu.draft_structs import Embedding, Head, Norm
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.kernels.cpu.structs import KINDS, Layer
from wingbeat.runtime.heads.layer import DecoderHead, kernel_layer
from wingbeat.runtime.verifier.layers.linears import InputMajorLinear, draft_matrices, pack_linear


class KernelHead(NamedTuple):
    """Addresses of a head's weights, and what they point into."""

    head: Head
    behind: list[Layer]
    """Layers behind the first."""
    held: list[object]

    @classmethod
    def from_layers(cls, head: DecoderHead, behind: Iterable[nn.Module] = ()) -> "KernelHead | None":
        """Layers, embedding and logits of a head. The head packs its weights, and adds what its family has besides.

        Args:
            behind: layers behind the first.

        Returns:
            None where the kernels do not read weights like these (`kernel_layer`).
        """
        kernels = cpu_kernels()
        layers = [kernel_layer(head, layer) for layer in (None, *behind)]
        if None in layers or not all([pack_linear(linear, kernels) for linear in (head.fc, head.lm_head)]):
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
        held: list[object] = [head, head.draft_token_ids, *(parameter.data for parameter in head.parameters())]
        held += [module._panels for module in head.modules() if isinstance(module, InputMajorLinear)]
        return cls(made, layers[1:], held)

    def over(self, caches: list[tuple[Tensor, Tensor]]) -> Head:
        """A head that reads and writes these keys and values."""
        made, behind = Head.from_buffer_copy(self.head), (Layer * len(self.behind))(*self.behind)
        for layer, cache in zip([made.layer, *behind], caches, strict=True):
            layer.key_cache, layer.value_cache = (tensor.data_ptr() for tensor in cache)
        made.behind = ctypes.cast(behind, ctypes.POINTER(Layer))
        self.held.append(behind)
        return made


def norm_of(head: DecoderHead, norm: nn.RMSNorm) -> Norm:
    """One of a head's norms; its weight in float32 lives as long as the head."""
    return Norm(head.wide_norm(norm).data_ptr(), norm.eps)


def embedding_of(weight: Tensor) -> Embedding:
    """Rows [num_tokens, size] of a dtype of `KINDS`; whoever holds it holds the tensor."""
    return Embedding(weight.data_ptr(), *weight.stride(), len(weight), KINDS[weight.dtype])
