"""Comparisons of the products of few rows with their references, for `wingbeat.kernels.gpu.comparison`."""

import torch
from torch import Tensor

from wingbeat.kernels.comparison_inputs import Shape, random_numbers
from wingbeat.kernels.few_rows.embedded import embed_to_heads
from wingbeat.kernels.few_rows.product import few_rows_product
from wingbeat.kernels.layer.draft_rows import Pairs, Projection, Stored


def _products(device: torch.device, shape: Shape) -> list[Tensor]:
    rows = (random_numbers(17, 7, 1280) / 36).to(shape.dtype).to(device)
    weight = random_numbers(18, 96, 1280, dtype=shape.dtype).to(device)
    ways = (few_rows_product(rows, weight), few_rows_product(rows, weight, weight[:, 3].contiguous(), gated=True))
    norm = (weight[5].contiguous(), 1e-6)
    ways += (few_rows_product(rows, weight, norm=norm), few_rows_product(rows, weight, gated=True, norm=norm))
    return [*ways, few_rows_product(rows, weight, total=ways[0].clone())]


def _heads(device: torch.device, shape: Shape) -> list[Tensor]:
    """Rows that are nodes with parents, and rows that are not."""
    num_all, size, angles = shape.num_heads + 2 * shape.num_kv_heads, 320, torch.arange(6)[:, None]
    weight, table, features = (
        random_numbers(seed, count, width, dtype=shape.dtype).to(device)
        for seed, count, width in ((19, num_all * shape.head_dim, 2 * size), (20, 5, size), (21, 6, size))
    )
    turned = angles * 0.9 ** torch.arange(shape.head_dim // 2)
    cos, sin = (wave.repeat(1, 2).to(shape.dtype).to(device) for wave in (turned.cos(), turned.sin()))
    cache = (8, shape.block_size, shape.num_kv_heads, shape.head_dim)
    keys, values = (torch.zeros(cache, dtype=shape.dtype, device=device) for _ in range(2))
    counters = torch.zeros(num_all, dtype=torch.int32, device=device)
    projection = Projection(weight / 25, weight[:, 3].contiguous(), (table[1], table[2]), 1e-6, counters)
    ids, parents = (torch.tensor(given, device=device) for given in ([3, 0, 2, 2, 1, 4], [[2, 0, 0], [1, 2, 1]]))
    stored, outs = Stored(cos, sin, keys, values, (shape.block_size + angles[:, 0]).to(device)), []
    for given in (Pairs(ids, table, features), Pairs(ids, table, features.view(2, 3, size), parents)):
        outs += [*embed_to_heads(given, projection, stored, normed=True), keys.float(), values.float()]
    return outs


CASES = {"few_rows_product": _products, "embed_to_heads": _heads}
