"""Comparison of the steps of attention over latents with their references, for `wingbeat.kernels.gpu.comparison`."""

import torch
from torch import Tensor

from wingbeat.kernels.comparison_inputs import Shape, random_numbers
from wingbeat.kernels.latent_attention.reference import Pairs, keep_latents, store_latents


def _inputs(device: torch.device, shape: Shape) -> tuple[list[Tensor], list[Tensor], torch.dtype]:
    """Returns queries of heads with 24 elements, of which 8 are rotated, and the rotated parts; waves and slots; and
    the dtype of caches.
    """
    query = random_numbers(1, 9, 6, 24, dtype=shape.dtype).to(device)
    shared = random_numbers(3, 9, 20, dtype=shape.dtype).to(device)[:, 12:]
    angles = torch.arange(9)[:, None] * 0.9 ** torch.arange(4)
    waves = [wave.repeat(1, 2).to(shape.dtype).to(device) for wave in (angles.cos(), angles.sin())]
    slots = (20 + 3 * torch.arange(9)).to(device)
    return [query, shared], [*waves, slots], torch.float8_e4m3fn if shape.fp8_cache else shape.dtype


def _stored(device: torch.device, shape: Shape) -> list[Tensor]:
    (query, shared), (*waves, slots), kept = _inputs(device, shape)
    made, found = random_numbers(2, 9, 6, 32, dtype=shape.dtype).to(device), []
    for pairs in Pairs:
        caches = [
            random_numbers(seed, 8, shape.block_size, 6, size, dtype=shape.dtype).to(kept).to(device)
            for seed, size in ((4, 24), (5, 16))
        ]
        turned = store_latents(query, made, shared, *waves, *caches, slots, pairs)
        found += [turned, *(cache.float() for cache in caches)]
    return found


def _kept(device: torch.device, shape: Shape) -> list[Tensor]:
    (query, shared), (*waves, slots), kept = _inputs(device, shape)
    sizes, found = ((9, 32), (6, 16, 32)), []
    latent, absorbed = (random_numbers(6, *size, dtype=shape.dtype).to(device) for size in sizes)
    for pairs in Pairs:
        cache = random_numbers(8, 8, shape.block_size, 1, 40, dtype=shape.dtype).to(kept).to(device)
        out = keep_latents(query, absorbed, latent, shared, *waves, cache, cache[..., :32], slots, pairs)
        found += [out, cache.float()]
    return found


CASES = {"store_latents": _stored, "keep_latents": _kept}
