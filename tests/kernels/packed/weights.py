"""Random weights in groups, in every format and with every kind of scales and shifts that files hold."""

import torch

from wingbeat.kernels.grouped_weight import E2M1, E4M3, INT8, UINT4, UINT5, UINT6, GroupedWeight, Scales


def grouped_weight(kind: str, columns: int = 37, inputs: int = 256) -> GroupedWeight:
    """A weight as files of a kind have it."""
    draw = torch.Generator().manual_seed(columns)

    def floats(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw) / 8).to(dtype)

    def whole(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most + 1, shape, generator=draw, dtype=torch.uint8)

    def values(most: int) -> torch.Tensor:
        return whole(most, columns, inputs)

    groups, blocks = (columns, inputs // 32), (columns, inputs // 256)
    if kind == "q4_0":
        return GroupedWeight(UINT4, values(15), Scales(floats(*groups)), offset=-8.0)
    if kind == "q4_1":
        return GroupedWeight(UINT4, values(15), Scales(floats(*groups)), Scales(floats(*groups)))
    if kind == "q4_k":
        scales, minima = (Scales(whole(63, *groups), floats(*blocks)) for _ in range(2))
        return GroupedWeight(UINT4, values(15), scales, minima)
    if kind == "q5_0":
        return GroupedWeight(UINT5, values(31), Scales(floats(*groups)), offset=-16.0)
    if kind == "q6_k":
        numbers = whole(255, columns, inputs // 16).view(torch.int8)
        return GroupedWeight(UINT6, values(63), Scales(numbers, floats(*blocks)), offset=-32.0)
    if kind == "q8_0":
        return GroupedWeight(INT8, values(255), Scales(floats(*groups)))
    if kind in ("awq", "gptq"):
        order = torch.randperm(inputs, generator=draw) if kind == "gptq" else None
        zeros = whole(15, columns, inputs // 64)
        return GroupedWeight(UINT4, values(15), Scales(floats(columns, inputs // 64)), zeros=zeros, order=order)
    if kind == "fp8":
        kept = values(255)
        scales = floats(columns, inputs // 128, dtype=torch.float32)
        return GroupedWeight(E4M3, torch.where(kept & 127 == 127, 126, kept), Scales(scales))
    if kind == "int8":
        return GroupedWeight(INT8, values(255), Scales(floats(columns, 1, dtype=torch.bfloat16)))
    if kind == "mxfp4":
        powers = torch.ldexp(torch.ones(groups), torch.randint(-9, 3, groups, generator=draw)).bfloat16()
        return GroupedWeight(E2M1, values(15), Scales(powers))
    raise ValueError(kind)


KINDS = ("q4_0", "q4_1", "q4_k", "q5_0", "q6_k", "q8_0", "awq", "gptq", "fp8", "int8", "mxfp4")
