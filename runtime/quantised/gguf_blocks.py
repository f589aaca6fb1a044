"""Converts blocks of a GGUF file's matrices to grouped weights with scales; block layouts are ggml's."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wingbeat.kernels.grouped_weight import E2M1, INT8, UINT4, UINT5, UINT6, GroupedWeight, Scales, half_powers
from wingbeat.runtime.quantised.gguf_file import GgufTensor


class Blocks(NamedTuple):
    """Format of a matrix that consists of blocks."""

    inputs: int
    """Number of inputs per block."""
    size: int
    """Bytes per block."""
    read: Callable[[Tensor], GroupedWeight]
    """Function (blocks uint8 [columns, blocks, size]) -> weight."""


def _halves(blocks: Tensor, begin: int) -> Tensor:
    """float16 [columns, blocks]: the number stored at byte `begin` of each block."""
    return _part(blocks, begin, begin + 2).view(torch.float16).flatten(1)


def _nibbles(blocks: Tensor, begin: int) -> Tensor:
    """4-bit integers [columns, inputs]; the low nibbles of a block's bytes hold the first half of its inputs."""
    return _bits(_part(blocks, begin), [0, 4], 15).flatten(1)


def _part(blocks: Tensor, begin: int, end: int | None = None) -> Tensor:
    """Copies a byte range of each block. The copy is made by NumPy, which copies the whole range of a block at once and
    is therefore faster than torch here.
    """
    size = blocks.shape[2]
    within = slice(*slice(begin, end).indices(size))
    kind = np.dtype({"names": ["part"], "formats": [f"V{within.stop - begin}"], "offsets": [begin], "itemsize": size})
    part = blocks.contiguous().numpy().view(kind)["part"].copy()
    return torch.from_numpy(part.view(np.uint8))


def _bits(rows: Tensor, shifts: list[int], mask: int) -> Tensor:
    """uint8 [..., n] -> [..., shifts, n]: selected bits of each byte, computed on 8-byte words."""
    words = rows.view(torch.int64)
    mask *= 0x0101010101010101
    return torch.stack([words >> shift & mask for shift in shifts], dim=-2).view(torch.uint8)


def _fives(blocks: Tensor, begin: int) -> Tensor:
    """5-bit integers [columns, inputs]; the first four bytes of a block hold the highest bits."""
    bits = torch.arange(8, dtype=torch.uint8)
    high = (blocks[:, :, begin : begin + 4, None] >> bits & 1).flatten(2).flatten(1)
    return _nibbles(blocks, begin + 4) | high << 4


def _q8_0(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(INT8, blocks[:, :, 2:].flatten(1), Scales(_halves(blocks, 0)))


def _q4_0(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(UINT4, _nibbles(blocks, 2), Scales(_halves(blocks, 0)), offset=-8.0)


def _q4_1(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(UINT4, _nibbles(blocks, 4), Scales(_halves(blocks, 0)), Scales(_halves(blocks, 2)))


def _q5_0(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(UINT5, _fives(blocks, 2), Scales(_halves(blocks, 0)), offset=-16.0)


def _q5_1(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(UINT5, _fives(blocks, 4), Scales(_halves(blocks, 0)), Scales(_halves(blocks, 2)))


def _k_scales(blocks: Tensor) -> tuple[Scales, Scales]:
    """Scales and minima of Q4_K and Q5_K: 6-bit integers in twelve bytes after the float16 factors."""
    first, second, last = blocks[:, :, 4:16].split(4, dim=2)
    scales = torch.cat([first & 63, last & 15 | first >> 6 << 4], dim=2).flatten(1)
    minima = torch.cat([second & 63, last >> 4 | second >> 6 << 4], dim=2).flatten(1)
    return Scales(scales, _halves(blocks, 0)), Scales(minima, -_halves(blocks, 2))


def _thirty_twos(rows: Tensor, shifts: list[int], mask: int) -> Tensor:
    """[columns, blocks, n * 32] -> [columns, blocks, n, shifts, 32]: selected bits of each byte."""
    return _bits(rows.unflatten(2, (-1, 32)), shifts, mask)


def _q4_k(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(UINT4, _thirty_twos(_part(blocks, 16), [0, 4], 15).flatten(1), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> GroupedWeight:
    high = _thirty_twos(_part(blocks, 16, 48), list(range(8)), 1)
    low = _thirty_twos(_part(blocks, 48), [0, 4], 15)
    return GroupedWeight(UINT5, low.flatten(1) | high.flatten(1) << 4, *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> GroupedWeight:
    low = _bits(_part(blocks, 0, 128).unflatten(2, (2, 64)), [0, 4], 15)
    high = _thirty_twos(_part(blocks, 128, 192), [0, 2, 4, 6], 3)
    scales = Scales(blocks[:, :, 192:208].contiguous().view(torch.int8).flatten(1), _halves(blocks, 208))
    return GroupedWeight(UINT6, low.flatten(1) | high.flatten(1) << 4, scales, offset=-32.0)


def _q3_k(blocks: Tensor) -> GroupedWeight:
    high = _thirty_twos(_part(blocks, 0, 32), list(range(8)), 1)
    low = _thirty_twos(_part(blocks, 32, 96), [0, 2, 4, 6], 3)
    lower = torch.cat([blocks[:, :, 96:104] & 15, blocks[:, :, 96:104] >> 4], dim=2)
    upper = torch.cat([blocks[:, :, 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], dim=2)
    scales = (lower | upper << 4).to(torch.int8) - 32
    return GroupedWeight(
        UINT4, low.flatten(1) | high.flatten(1) << 2, Scales(scales.flatten(1), _halves(blocks, 108)), offset=-4.0
    )


def _q2_k(blocks: Tensor) -> GroupedWeight:
    both = blocks[:, :, :16].flatten(1)
    values = _thirty_twos(_part(blocks, 16, 80), [0, 2, 4, 6], 3).flatten(1)
    scales, minima = Scales(both & 15, _halves(blocks, 80)), Scales(both >> 4, -_halves(blocks, 82))
    return GroupedWeight(UINT4, values, scales, minima)


def _mxfp4(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(E2M1, _nibbles(blocks, 1), Scales(half_powers(blocks[:, :, 0])))


FORMS = {
    "Q8_0": Blocks(32, 34, _q8_0),
    "Q4_0": Blocks(32, 18, _q4_0),
    "Q4_1": Blocks(32, 20, _q4_1),
    "Q5_0": Blocks(32, 22, _q5_0),
    "Q5_1": Blocks(32, 24, _q5_1),
    "Q2_K": Blocks(256, 84, _q2_k),
    "Q3_K": Blocks(256, 110, _q3_k),
    "Q4_K": Blocks(256, 144, _q4_k),
    "Q5_K": Blocks(256, 176, _q5_k),
    "Q6_K": Blocks(256, 210, _q6_k),
    "MXFP4": Blocks(32, 17, _mxfp4),
}
"""Formats of blocks that the kernels can read."""


def grouped_rows(data: np.ndarray, tensor: GgufTensor) -> GroupedWeight:
    """Reads rows of a matrix in one of the formats of `FORMS`.

    Args:
        data: uint8 [columns, bytes of a row]
        tensor: the matrix's description.
    """
    layout = FORMS[tensor.tensor_type.name]
    return layout.read(torch.from_numpy(data).view(len(data), int(tensor.shape[0]) // layout.inputs, layout.size))
