"""Launches of the step of attention over latents, for `compile_launches`."""

import torch

from wingbeat.kernels.latent_attention import triton as triton_latents
from wingbeat.kernels.latent_attention.reference import Pairs


def launch_all() -> None:
    """Sizes of DeepSeek-V3 and of GLM-4.7-Flash."""
    for num_heads, plain, turned, value_dim in ((128, 128, 64, 128), (20, 192, 64, 256)):
        query, made, shared = (
            torch.zeros(60, *size, dtype=torch.bfloat16)
            for size in ((num_heads, plain + turned), (num_heads, plain + value_dim), (turned,))
        )
        caches = [query.new_zeros(9, 16, num_heads, size) for size in (plain + turned, value_dim)]
        slots = torch.zeros(60, dtype=torch.int64)
        for pairs in Pairs:
            triton_latents.store_latents(query, made, shared, shared, shared, *caches, slots, pairs)
        out, latent, cache = (query.new_zeros(*size) for size in ((60, num_heads, 576), (60, 512), (9, 16, 1, 576)))
        for kept in (cache, cache.to(torch.float8_e4m3fn)):
            triton_latents.keep_latents(query[..., plain:], out, latent, *[shared] * 3, kept, slots, Pairs.STAY)
