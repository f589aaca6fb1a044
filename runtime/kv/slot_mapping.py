"""Where in the pool a stored position of a sequence lies: the one place that knows."""

import torch
from torch import Tensor


def slot_mapping(block_tables: Tensor, positions: Tensor, block_size: int, counted: Tensor | None = None) -> Tensor:
    """Address of each stored position: block id * block_size + offset, int64 [num_reqs, n].

    Args:
        block_tables: int64 [num_reqs, num_table_blocks].
        positions: int64 [num_reqs, n]: index among what the sequence stores; one outside its table has an address
            of somebody's, and must not count.
        counted: bool [num_reqs, n]: the others are dropped, which is what block 0 is for; None counts all.
    """
    blocks = block_tables.gather(1, (positions // block_size).clamp(0, block_tables.shape[1] - 1))
    mapping = blocks * block_size + positions % block_size
    return mapping if counted is None else torch.where(counted, mapping, 0)
