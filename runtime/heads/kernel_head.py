"""An EAGLE or P-EAGLE head as the CPU's kernels read it: from tokens and taps to the logits of the draft vocabulary."""

import ctypes
from typing import NamedTuple

from torch import Tensor, nn

from wingbeat.kernels.cpu.draft_structs import Embedding, Head, Norm
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.kernels.cpu.structs import KINDS, Layer
from wingbeat.runtime.heads.contract import DraftHead
from wingbeat.runtime.heads.eagle1 import Eagle1Head
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.heads.layer import KERNEL_DTYPES, kernel_layer
from wingbeat.runtime.heads.one_pass.parallel_eagle import ParallelEagleHead
from wingbeat.runtime.verifier.layers.linears import InputMajorLinear, draft_matrices, pack_linear


class KernelHead(NamedTuple):
    """Addresses of a head's weights, and what they point into."""

    head: Head
    held: list[object]
    behind: list[Layer]
    """Of a P-EAGLE head, the layers behind the first."""

    @classmethod
    def of(cls, head: DraftHead) -> "KernelHead | None":
        """None where the kernels do not know such a head, or weights like its own (`kernel_layer`). They are packed."""
        if type(head) not in (EagleHead, Eagle1Head, ParallelEagleHead) or head.dtype not in KERNEL_DTYPES:
            return None
        if type(head) is EagleHead and head.config.num_layers > 1:
            return None
        behind = head.behind if isinstance(head, ParallelEagleHead) else []
        layer, *others = kernel_layer(head), *(kernel_layer(head, other) for other in behind)
        kernels = cpu_kernels()
        if layer is None or None in others or not all([pack_linear(part, kernels) for part in (head.fc, head.lm_head)]):
            return None
        [fc], [logits] = map(draft_matrices, (head.fc, head.lm_head))
        made = Head(
            layer=layer,
            embedding=embedding_of(head.embed_tokens.weight),
            num_taps=head.config.num_taps,
            tap_width=head.config.target_hidden_size,
            logits=logits,
            draft_token_ids=head.draft_token_ids.data_ptr(),
        )
        held: list[object] = [head, head.draft_token_ids, *(parameter.data for parameter in head.parameters())]
        held += [module._panels for module in head.modules() if isinstance(module, InputMajorLinear)]
        if isinstance(head, Eagle1Head):
            made.joined = fc
            return cls(made, held, [])
        config = head.config
        made.fused = fc

        def wide(norm: nn.RMSNorm) -> Norm:
            return Norm(head.wide_norm(norm).data_ptr(), norm.eps)

        made.embedding_norm, made.feature_norm = wide(head.input_layernorm), wide(head.hidden_norm)
        made.output_norm = wide(head.norm)
        made.norms_feedback, made.norms_residual = config.norm_output, config.norm_before_residual
        if head.input_norm is not None:
            made.taps_norm = wide(head.input_norm)
        if head.fc_norm is not None:
            norms = (Norm * len(head.fc_norm))(*map(wide, head.fc_norm))
            held.append(norms)
            made.tap_norms = ctypes.cast(norms, ctypes.POINTER(Norm))
        if isinstance(head, ParallelEagleHead):
            features = head.masked_features().detach().float().contiguous()
            made.mask_features, made.mask_token = features.data_ptr(), head.mask_token_id
            made.num_behind = len(others)
            held.append(features)
        return cls(made, held, others)

    def over(self, caches: list[tuple[Tensor, Tensor]]) -> Head:
        """A head that reads and writes these keys and values."""
        made, behind = Head.from_buffer_copy(self.head), (Layer * len(self.behind))(*self.behind)
        for layer, cache in zip([made.layer, *behind], caches, strict=True):
            layer.key_cache, layer.value_cache = (part.data_ptr() for part in cache)
        made.behind = ctypes.cast(behind, ctypes.POINTER(Layer))
        self.held.append(behind)
        return made


def embedding_of(weight: Tensor) -> Embedding:
    """Rows [num_tokens, size] of a dtype of `KINDS`; whoever holds it holds the tensor."""
    return Embedding(weight.data_ptr(), *weight.stride(), len(weight), KINDS[weight.dtype])
