"""Steps of a decoder layer between its matrix products: torch reference.

GPUs use `kernels.gpu.layer`, one launch per step. The steps round where transformers' modules round. A layer composed
of these steps therefore computes the same numbers as transformers' layer, up to the order in which a norm sums its
squares.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.kernels import choice
from wingbeat.kernels.kv.reference import store_kv

MOST_HIDDEN = 1 << 15
"""Longest row that the norm kernel supports, because one program keeps the whole row in registers."""


class Turn(NamedTuple):
    """Elements of a head that RoPE rotates together; elements behind the rotated ones stay as they are."""

    one_half: bool = False
    """Whether cosines and sines have one column per pair, instead of two equal halves."""
    in_pairs: bool = False
    """Whether neighbouring elements are rotated together, instead of elements of the rotated part's two halves."""
    norm_last: bool = False
    """Whether the norm of a head follows its rotation."""
    repeated: bool = False
    """Whether equal cosines and sines are next to each other, instead of in two equal halves."""

    def num_pairs(self, cos: Tensor) -> int:
        """Returns the number of pairs that are rotated by cosines [..., width]."""
        return cos.shape[-1] if self.one_half else cos.shape[-1] // 2


WHOLE = Turn()


def add_rms_norm(
    hidden: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    factors: tuple[float, float] | None = None,
    other: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the sum of two or three tensors and its root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467).

    Args:
        hidden: [num_tokens, hidden_size], contiguous; without a residual also part of wider rows.
        residual: added to `hidden` first; None normalises `hidden` alone.
        weight: [hidden_size] in the same dtype or float32.
        factors: factors of `hidden` and of `other` in the sum; only with a residual.
        other: third addend, like `hidden`; only with factors.

    Returns:
        Norm and sum, [num_tokens, hidden_size] each; the sum is `hidden` itself if residual is None.
    """
    if kernels := choice.compiled("add_rms_norm", hidden):
        return kernels.add_rms_norm(hidden, residual, weight, eps, factors, other)
    if factors is not None:
        hidden = hidden * factors[0] if other is None else hidden * factors[0] + other * factors[1]
    total = hidden if residual is None else residual + hidden
    return _rms_norm(total, weight, eps), total


def add_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, eps: float, then: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Adds the root-mean-square norm of `hidden` to `residual`, and normalises the sum.

    Args:
        hidden: as for `add_rms_norm`; `residual` and `weight` likewise.
        then: weight of the second norm; None leaves it out.

    Returns:
        Norm of the sum, or the sum itself, and the sum, [num_tokens, hidden_size] each.
    """
    if kernels := choice.compiled("add_rms_norm", hidden):
        return kernels.add_norm(hidden, residual, weight, eps, then)
    total = residual + _rms_norm(hidden, weight, eps)
    return total if then is None else _rms_norm(total, then, eps), total


def norm_parts(rows: Tensor, weights: tuple[Tensor, Tensor], eps: float) -> None:
    """Normalises the first two parts of rows [num_tokens, size] by their root mean squares, in place.

    Args:
        weights: norm weights, [size of the part] each.
    """
    if kernels := choice.compiled("add_rms_norm", rows):
        kernels.norm_parts(rows, weights, eps)
        return
    first, second = map(len, weights)
    for part, weight in ((rows[:, :first], weights[0]), (rows[:, first : first + second], weights[1])):
        part.copy_(_rms_norm(part, weight, eps))


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of [..., hidden_size]; contiguous rows on a GPU use the kernel of `add_rms_norm`."""
    # The kernel takes a third of the time of torch's norm on an H100, and a draft level has three norms.
    fits = rows.is_contiguous() and rows.dtype == weight.dtype and rows.shape[-1] <= MOST_HIDDEN
    if fits and (kernels := choice.compiled("add_rms_norm", rows)):
        return kernels.add_rms_norm(rows, None, weight, eps)[0]
    return functional.rms_norm(rows, weight.shape, weight, eps)


def embed_beside(
    token_ids: Tensor,
    table: Tensor,
    features: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    parents: Tensor | None = None,
    normed: bool = True,
) -> tuple[Tensor, Tensor]:
    """Normalises tokens' embeddings and the features paired with them, and concatenates both; one launch on CUDA.

    Args:
        token_ids: int64 [num_rows].
        table: [vocab_size, size]; all floating tensors have one dtype.
        features: [num_rows, size], contiguous; with `parents` [num_reqs, num_nodes, size].
        weights: norm weights [size] of embeddings and of features.
        parents: int64 [num_reqs, width]: index of each row's features among its request's; None if every row has its
            own.
        normed: whether the second result is normalised.

    Returns:
        [num_rows, 2 * size]: the normalised embedding, then the normalised features; and [num_rows, size]: the rows'
        features, normalised if `normed`.
    """
    if kernels := choice.compiled("add_rms_norm", features):
        return kernels.embed_beside(token_ids, table, features, weights, eps, parents, normed)
    if parents is not None:
        features = features.gather(1, parents[..., None].expand(-1, -1, features.shape[2])).flatten(0, 1)
    both = [_rms_norm(rows, weight, eps) for rows, weight in zip((table[token_ids], features), weights, strict=True)]
    return torch.cat(both, dim=-1), both[1] if normed else features


def rotations(
    positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype, halves: int = 2
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions' rotary angles, [..., halves * n] each.

    Args:
        positions: int64 [...].
        frequencies: float32 [n].
        scale: factor of both results, applied before rounding.
        halves: number of repetitions of the frequencies, 1 or 2.
    """
    if kernels := choice.compiled("rotations", positions):
        return kernels.rotations(positions, frequencies, scale, dtype, halves)
    angles = positions.unsqueeze(-1).to(torch.float32) * frequencies
    cos, sin = ((wave * scale).to(dtype) for wave in (angles.cos(), angles.sin()))
    return (cos, sin) if halves == 1 else (torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1))


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    turn: Turn = WHOLE,
    factors: tuple[float, float] | None = None,
) -> Tensor:
    """Normalises queries and keys, applies RoPE to them (arXiv 2104.09864), and stores keys and values.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, dim], contiguous: queries, keys, values.
        cos: [num_tokens, width] in the same dtype, contiguous, usually with equal halves; `sin` likewise. Only the last
            columns are read, because the first half of the sine may have a sign folded in.
        key_cache: [num_blocks, block_size, num_kv_heads, dim] in the same dtype, or float8_e4m3fn, converted as by
            `store_kv`; `value_cache` likewise.
        slot_mapping: int64 [num_tokens], as for `store_kv`.
        query_norm: [dim] in the same dtype or float32: weight of a norm over each query head, applied before the
            rotation unless `turn` has it last; None applies no norm.
        key_norm: [dim], likewise for keys; given if and only if query_norm is given.
        turn: which elements are rotated together.
        factors: factors of queries and values, and of keys, applied first; None applies none.

    Returns:
        The rotated queries: [num_tokens, num_heads, dim].

    Raises:
        ValueError: slots are not contiguous int64. On CUDA: shapes or dtypes do not match.
    """
    if kernels := choice.compiled("rotate_and_store", qkv):
        norms = (query_norm, key_norm, eps)
        return kernels.rotate_and_store(qkv, cos, sin, key_cache, value_cache, slot_mapping, *norms, turn, factors)
    num_kv_heads = key_cache.shape[2]
    query, key, value = qkv.split([qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if factors is not None:
        query, key, value = query * factors[0], key * factors[1], value * factors[0]
    if turn.norm_last:
        query, key = _rotate(query, cos, sin, turn), _rotate(key, cos, sin, turn)
    if query_norm is not None and key_norm is not None:
        query, key = _rms_norm(query, query_norm, eps), _rms_norm(key, key_norm, eps)
    if not turn.norm_last:
        query, key = _rotate(query, cos, sin, turn), _rotate(key, cos, sin, turn)
    store_kv(key, value, key_cache, value_cache, slot_mapping)
    return query


def silu_mul(gate_up: Tensor) -> Tensor:
    """Gated activation silu(gate) * up: contiguous [num_tokens, 2 * size], gates first -> [num_tokens, size]."""
    if kernels := choice.compiled("silu_mul", gate_up):
        return kernels.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gated_norm(
    values: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 0.0,
    group_size: int = 0,
    gate_first: bool = True,
    factor: float = 1.0,
) -> Tensor:
    """Multiplies by silu(factor * gate) and normalises groups by their root mean square; the gate's dtype.

    Args:
        values: [..., size], contiguous.
        gate: [..., size].
        weight: [size] or [group_size]; None leaves the norm out.
        group_size: number of elements with a norm of their own.
        gate_first: whether the norm follows the gate.
    """
    if kernels := choice.compiled("gated_norm", values):
        return kernels.gated_norm(values, gate, weight, eps, group_size, gate_first, factor)
    active = functional.silu(gate.float() * factor if factor != 1.0 else gate.float())
    wide = values.float() * active if gate_first or weight is None else values.float()
    if weight is not None:
        groups = wide.unflatten(-1, (-1, group_size))
        normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).to(values.dtype)
        wide = (normed * weight.view(-1, group_size)).flatten(-2)
        wide = wide if gate_first else wide * active
    return wide.to(gate.dtype)


def _rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = values.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # If the weight is float32, the conversion of `wide` does not round, so the result is rounded only once.
    return (weight * wide.to(weight.dtype)).to(values.dtype)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, turn: Turn) -> Tensor:
    num_pairs = turn.num_pairs(cos)
    columns = slice(0, None, 2) if turn.repeated else slice(cos.shape[-1] - num_pairs, None)
    cos, sin = (part[:, None, columns] for part in (cos, sin))
    turned, rest = heads[..., : 2 * num_pairs], heads[..., 2 * num_pairs :]
    low, high = (turned[..., ::2], turned[..., 1::2]) if turn.in_pairs else turned.chunk(2, dim=-1)
    parts = (low * cos - high * sin, high * cos + low * sin)
    return torch.cat([torch.stack(parts, dim=-1).flatten(-2), rest] if turn.in_pairs else [*parts, rest], dim=-1)
