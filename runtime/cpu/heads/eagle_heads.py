"""Readers of EAGLE heads, by class of the head."""

import ctypes
from typing import Any

from wingbeat.kernels.cpu.draft_structs import Norm
from wingbeat.runtime.cpu.heads.kernel_head import KernelHead
from wingbeat.runtime.cpu.layers.packed_linears import draft_matrices
from wingbeat.runtime.heads.eagle1 import Eagle1Head
from wingbeat.runtime.heads.eagle3 import EagleHead


def kernel_head(head: Any) -> KernelHead | None:
    """Packs an EAGLE head's weights for the kernels; None for other heads and unsupported weights."""
    read = READERS.get(type(head))
    return None if read is None else read(head)


def read_eagle(head: EagleHead) -> KernelHead | None:
    """Reads an EAGLE-3 head, or a head of another class that computes the same as EAGLE-3."""
    made = KernelHead.from_layers(head, head.behind)
    if made is None:
        return None
    read = made.head
    [read.fused] = draft_matrices(head.fc)
    read.output_norm = made.norm(head.norm)
    read.embedding_norm, read.feature_norm = made.norm(head.input_layernorm), made.norm(head.hidden_norm)
    read.norms_feedback, read.norms_residual = head.config.norm_output, head.config.norm_before_residual
    if head.input_norm is not None:
        read.taps_norm = made.norm(head.input_norm)
    if head.fc_norm is not None:
        norms = (Norm * len(head.fc_norm))(*map(made.norm, head.fc_norm))
        made.held.append(norms)
        read.tap_norms = ctypes.cast(norms, ctypes.POINTER(Norm))
    return made


def _read_eagle1(head: Eagle1Head) -> KernelHead | None:
    made = KernelHead.from_layers(head)
    if made is not None:
        [made.head.joined] = draft_matrices(head.fc)
    return made


READERS = {EagleHead: read_eagle, Eagle1Head: _read_eagle1}
