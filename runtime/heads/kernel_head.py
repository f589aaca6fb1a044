"""An EAGLE head as the CPU's kernels read it, whole: from tokens and taps to the logits of the draft vocabulary."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor, nn

from wingbeat.kernels.cpu.draft_structs import Head, Norm
from wingbeat.kernels.cpu.ops import matrix_of
from wingbeat.runtime.heads.contract import DraftHead
from wingbeat.runtime.heads.eagle1 import Eagle1Head
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.heads.layer import kernel_layer


class KernelHead(NamedTuple):
    """Addresses of a head's weights, and what they point into."""

    head: Head
    held: list[object]

    @classmethod
    def of(cls, head: DraftHead) -> "KernelHead | None":
        """None where the kernels do not know such a head, or its weights are not float32 on the CPU, input by input."""
        if type(head) not in (EagleHead, Eagle1Head) or head.dtype != torch.float32:
            return None
        linears = [module for module in (head.qkv_proj, head.gate_up_proj, head.down_proj, head.fc, head.lm_head)]
        if not all(isinstance(linear, nn.Linear) for linear in linears):
            return None
        layer = kernel_layer(head)
        try:
            fc, logits = (matrix_of(linear.weight, linear.bias) for linear in (head.fc, head.lm_head))
        except ValueError:
            return None
        if layer is None:
            return None
        embedding = head.embed_tokens.weight
        made = Head(
            layer=layer,
            embedding=embedding.data_ptr(),
            embedding_row=embedding.stride(0),
            embedding_column=embedding.stride(1),
            num_embeddings=len(embedding),
            num_taps=head.config.num_taps,
            tap_width=head.config.target_hidden_size,
            logits=logits,
            draft_token_ids=head.draft_token_ids.data_ptr(),
        )
        held: list[object] = [head, head.draft_token_ids, *(parameter.data for parameter in head.parameters())]
        if isinstance(head, Eagle1Head):
            made.joined = fc
            return cls(made, held)
        config = head.config
        made.fused = fc
        made.embedding_norm, made.feature_norm = _norm(head.input_layernorm), _norm(head.hidden_norm)
        made.output_norm = _norm(head.norm)
        made.norms_feedback, made.norms_residual = config.norm_output, config.norm_before_residual
        if head.input_norm is not None:
            made.taps_norm = _norm(head.input_norm)
        if head.fc_norm is not None:
            norms = (Norm * len(head.fc_norm))(*(_norm(norm) for norm in head.fc_norm))
            held.append(norms)
            made.tap_norms = ctypes.cast(norms, ctypes.POINTER(Norm))
        return cls(made, held)

    def over(self, cache: tuple[Tensor, Tensor]) -> Head:
        """A head that reads and writes these keys and values."""
        made = Head.from_buffer_copy(self.head)
        made.layer.key_cache, made.layer.value_cache = (part.data_ptr() for part in cache)
        return made


def _norm(norm: nn.RMSNorm) -> Norm:
    return Norm(norm.weight.data_ptr(), norm.eps)
