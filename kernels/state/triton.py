"""Gated delta rule over draft trees on a GPU, one launch for all trees and heads; the reference is `reference`.

A program computes the nodes of one tree for one value head and a part of this head's columns, all in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.state.rows import Added, TreeRows

MOST_NODES, MOST_KEYS = 16, 128
"""Maximum number of nodes of a tree, and maximum head dimension of keys, that a program's registers hold."""
_LEAST = 16
"""Minimum dimension of a matrix product on tensor cores."""
_PRECISION = tl.constexpr("tf32x3")
"""Precision of float32 matrix products: as exact as float32 sums. `ieee` would need more registers than there are."""


@triton.jit
def _delta_rule_kernel(
    query,
    key,
    value,
    decay,
    beta,
    states,
    slots,
    visible,
    out,
    out_keys,
    out_added,
    out_decay,
    query_strides,
    key_strides,
    value_strides,
    decay_strides,
    beta_strides,
    num_nodes,
    num_heads,
    num_key_heads,
    key_dim,
    value_dim,
    scale,
    epsilon,
    NORMED: tl.constexpr,
    NODES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    req, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    per_key = num_heads // num_key_heads
    key_head = head // per_key
    nodes, keys, values = tl.arange(0, NODES), tl.arange(0, KEYS), part * VALUES + tl.arange(0, VALUES)
    real, in_keys, in_values = nodes < num_nodes, keys < key_dim, values < value_dim
    of_keys = real[:, None] & in_keys[None, :]
    of_values = real[:, None] & in_values[None, :]
    q_at = query + req * query_strides[0] + key_head * query_strides[2]
    q = tl.load(q_at + nodes[:, None] * query_strides[1] + keys[None, :] * query_strides[3], mask=of_keys, other=0.0)
    k_at = key + req * key_strides[0] + key_head * key_strides[2]
    k = tl.load(k_at + nodes[:, None] * key_strides[1] + keys[None, :] * key_strides[3], mask=of_keys, other=0.0)
    v_at = value + req * value_strides[0] + head * value_strides[2]
    v_at += nodes[:, None] * value_strides[1] + values[None, :] * value_strides[3]
    v = tl.load(v_at, mask=of_values, other=0.0).to(tl.float32)
    q, k = q.to(tl.float32), k.to(tl.float32)
    if NORMED:
        q *= tl.rsqrt(tl.sum(q * q, axis=1) + epsilon)[:, None]
        k *= tl.rsqrt(tl.sum(k * k, axis=1) + epsilon)[:, None]
    q *= scale
    decay_at = decay + req * decay_strides[0] + head * decay_strides[2]
    own = tl.load(decay_at + nodes * decay_strides[1], mask=real, other=0.0).to(tl.float32)
    beta_at = beta + req * beta_strides[0] + head * beta_strides[2]
    b = tl.load(beta_at + nodes * beta_strides[1], mask=real, other=0.0).to(tl.float32)
    square = req * num_nodes * num_nodes + nodes[:, None] * num_nodes + nodes[None, :]
    sees = tl.load(visible + square, mask=real[:, None] & real[None, :], other=0) != 0
    total = tl.sum(tl.where(sees, own[None, :], 0.0), axis=1)
    since = tl.where(sees, tl.exp(tl.where(sees, total[:, None] - total[None, :], 0.0)), 0.0)
    state_at = (tl.load(slots + req) * num_heads + head) * key_dim * value_dim
    of_state = in_keys[:, None] & in_values[None, :]
    state = tl.load(states + state_at + keys[:, None] * value_dim + values[None, :], mask=of_state, other=0.0)
    state = state.to(tl.float32)
    reached = tl.exp(total)[:, None]
    added = (v - tl.dot(k, state, input_precision=_PRECISION) * reached) * b[:, None]
    overlap = tl.dot(k * b[:, None], tl.trans(k), input_precision=_PRECISION) * since
    for node in range(1, num_nodes):
        # Rows before `node` are final; `node` itself and later rows are masked out.
        row = tl.sum(tl.where((nodes == node)[:, None] & (nodes < node)[None, :], overlap, 0.0), axis=0)
        known = tl.sum(row[:, None] * added, axis=0)
        added = tl.where((nodes == node)[:, None], added - known[None, :], added)
    shown = tl.dot(q, tl.trans(k), input_precision=_PRECISION) * since
    seen = tl.dot(q, state, input_precision=_PRECISION) * reached
    seen += tl.dot(shown, added, input_precision=_PRECISION)
    at = ((req * num_nodes + nodes[:, None]) * num_heads + head) * value_dim + values[None, :]
    tl.store(out + at, seen.to(out.dtype.element_ty), mask=of_values)
    tl.store(out_added + at, added, mask=of_values)
    if part == 0:
        tl.store(out_decay + (req * num_nodes + nodes) * num_heads + head, total, mask=real)
        if head % per_key == 0:
            keys_at = ((req * num_nodes + nodes[:, None]) * num_key_heads + key_head) * key_dim + keys[None, :]
            tl.store(out_keys + keys_at, k, mask=of_keys)


def fits(query: Tensor) -> bool:
    """Whether a program's registers hold trees of this size; query is [num_reqs, num_nodes, num_key_heads, key_dim]."""
    return query.shape[1] <= MOST_NODES and query.shape[3] <= MOST_KEYS


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    rows: TreeRows,
    epsilon: float | None,
) -> tuple[Tensor, Added]:
    """Launches the kernel for `reference.delta_rule`."""
    (num_reqs, num_nodes, num_heads, value_dim), (num_key_heads, key_dim) = value.shape, key.shape[2:]
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    keys = torch.empty(key.shape, dtype=torch.float32, device=value.device)
    added = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    total = torch.empty(decay.shape, dtype=torch.float32, device=value.device)
    columns = min(max(triton.next_power_of_2(value_dim), _LEAST), 32)
    if out.numel():
        with torch.cuda.device_of(value):
            _delta_rule_kernel[(num_reqs, num_heads, triton.cdiv(value_dim, columns))](
                query,
                key,
                value,
                decay,
                beta,
                states,
                rows.slots,
                rows.visible.contiguous().view(torch.uint8),
                out,
                keys,
                added,
                total,
                query.stride(),
                key.stride(),
                value.stride(),
                decay.stride(),
                beta.stride(),
                num_nodes,
                num_heads,
                num_key_heads,
                key_dim,
                value_dim,
                key_dim**-0.5,
                0.0 if epsilon is None else epsilon,
                NORMED=epsilon is not None,
                NODES=max(triton.next_power_of_2(num_nodes), _LEAST),
                KEYS=max(triton.next_power_of_2(key_dim), _LEAST),
                VALUES=columns,
                num_warps=4,
                **options(fused=True),
            )
    return out, Added(keys, added, total)
