"""Readers of one-pass heads, by class of the head."""

from typing import Any

from wingbeat.runtime.cpu.heads.eagle_heads import read_eagle
from wingbeat.runtime.cpu.heads.kernel_head import AnyKernelHead, KernelHead
from wingbeat.runtime.cpu.one_pass.kernel_block import KernelBlock
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.parallel_eagle import ParallelEagleHead


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
