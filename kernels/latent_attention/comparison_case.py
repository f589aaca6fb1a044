"""Comparison of the steps of attention over latents with their references, for `wingbeat.kernels.gpu.comparison`."""

import torch
from torch import Tensor

from wingbeat.kernels.comparison_inputs import Shape, random_numbers
from wingbeat.kernels.latent_attention.reference import Pairs, keep_latents, store_latents


def _latents(device: torch.device, shape: Shape) -> list[Tensor]:
    """Heads of 24 and 16 elements, of which 8 are rotated, in every order."""
    kept = torch.float8_e4m3fn if shape.fp8_cache else shape.dtype
    query, made = (random_numbers(seed, 9, 6, size, dtype=shape.dtype).to(device) for seed, size in ((1, 24), (2, 32)))
    shared = random_numbers(3, 9, 20, dtype=shape.dtype).to(device)[:, 12:]
    angles = torch.arange(9)[:, None] * 0.9 ** torch.arange(4)
    turned = [wave.repeat(1, 2).to(shape.dtype).to(device) for wave in (angles.cos(), angles.sin())]
    slots, found = (20 + 3 * torch.arange(9)).to(device), []
    for pairs in Pairs:
        caches = [
            random_numbers(seed, 8, shape.block_size, 6, size, dtype=shape.dtype).to(kept).to(device)
            for seed, size in ((4, 24), (5, 16))
        ]
        query_out = store_latents(query, made, shared, *turned, *caches, slots, pairs)
        found += [query_out, *(cache.float() for cache in caches)]
        latent, absorbed = (
            random_numbers(6, 9, 32, dtype=shape.dtype),
            random_numbers(7, 6, 16, 32, dtype=shape.dtype),
        )
        cache = random_numbers(8, 8, shape.block_size, 1, 40, dtype=shape.dtype).to(kept).to(device)
        made_of = query, absorbed.to(device), latent.to(device), shared
        found += [keep_latents(*made_of, *turned, cache, cache[..., :32], slots, pairs), cache.float()]
    return found


CASES = {"store_latents": _latents}
