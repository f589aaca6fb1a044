"""Scales of queries by position (Llama 4's attention temperature), which transformers' code takes from the place of a
row in its batch.
"""

import torch
from torch import Tensor, nn

SCALES = "wingbeat_query_scales"
"""Name of the buffer of an attention module, float32 [num_positions]: factors of the queries."""


def keep_query_scales(model: nn.Module, num_positions: int) -> None:
    """Makes the attention function scale queries by their positions, in modules whose own code would scale them.

    Args:
        num_positions: length of the longest possible sequence.
    """
    tables: dict[tuple[float, float], Tensor] = {}
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            key = module.floor_scale, module.attn_scale
            if key not in tables:
                device = next(module.parameters()).device
                steps = ((torch.arange(num_positions, device=device) + 1.0) / module.floor_scale).floor()
                tables[key] = steps.log1p() * module.attn_scale + 1.0
            module.attn_temperature_tuning = False
            module.register_buffer(SCALES, tables[key], persistent=False)


def scaled(query: Tensor, scales: Tensor, positions: Tensor) -> Tensor:
    """Scales queries [num_tokens, num_heads, dim] of rows at `positions` [num_tokens] by `scales` [num_positions]."""
    return (query * scales[positions.clamp_max(len(scales) - 1)][:, None, None]).to(query.dtype)
