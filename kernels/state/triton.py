"""Recurrences over draft trees on a GPU, one launch for all trees and heads; the reference is `reference`.

A program of a recurrence computes the nodes of one tree for one head and a part of this head's columns, all in
registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.state.rows import Added, Path, Steps, TreeRows

MOST_NODES, MOST_KEYS, MOST_STATES = 16, 128, 256
"""Maximum number of nodes of a tree, maximum head dimension of keys, and maximum dimension of a state space, that a
program's registers hold."""
_CHANNEL_TILE, _STATE_TILE = 256, 64
_LEAST = 16
"""Minimum dimension of a matrix product on tensor cores."""
_PRECISION = tl.constexpr("tf32x3")
"""Precision of float32 matrix products: as exact as float32 sums. `ieee` would need more registers than there are."""


@triton.jit
def softplus(x):
    """As torch computes softplus: logarithm of 1 + exp(x), exact also where exp(x) is small."""
    grown = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + grown
    # The logarithm's error that 1 + exp(x) has by rounding is divided out.
    log = tl.where(more == 1.0, grown, tl.log(more) * (grown / tl.where(more == 1.0, 1.0, more - 1.0)))
    return tl.where(x > 20.0, x, log)


@triton.jit
def seen_nodes(visible, req, nodes, num_nodes):
    """Loads which column nodes are ancestors of row nodes, the nodes themselves included."""
    real = nodes < num_nodes
    square = req * num_nodes * num_nodes + nodes[:, None] * num_nodes + nodes[None, :]
    return tl.load(visible + square, mask=real[:, None] & real[None, :], other=0) != 0


@triton.jit
def decays(own, sees):
    """Logarithms of the decays up to nodes, and decays from column nodes to row nodes, by the nodes' own logarithms."""
    total = tl.sum(tl.where(sees, own[None, :], 0.0), axis=1)
    return total, tl.where(sees, tl.exp(tl.where(sees, total[:, None] - total[None, :], 0.0)), 0.0)


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
    rates,  # [num_heads], or None: decay and beta are as given
    shifts,  # [num_heads], or None
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
    k_at = key + req * key_strides[0] + key_head * key_strides[2]
    k = tl.load(k_at + nodes[:, None] * key_strides[1] + keys[None, :] * key_strides[3], mask=of_keys, other=0.0)
    v_at = value + req * value_strides[0] + head * value_strides[2]
    v_at += nodes[:, None] * value_strides[1] + values[None, :] * value_strides[3]
    v = tl.load(v_at, mask=of_values, other=0.0).to(tl.float32)
    k = k.to(tl.float32)
    if NORMED:
        k *= tl.rsqrt(tl.sum(k * k, axis=1) + epsilon)[:, None]
    decay_at = decay + req * decay_strides[0] + head * decay_strides[2]
    own = tl.load(decay_at + nodes * decay_strides[1], mask=real, other=0.0).to(tl.float32)
    beta_at = beta + req * beta_strides[0] + head * beta_strides[2]
    b = tl.load(beta_at + nodes * beta_strides[1], mask=real, other=0.0).to(tl.float32)
    if rates is not None:
        rate, shift = tl.load(rates + head).to(tl.float32), tl.load(shifts + head).to(tl.float32)
        own = -tl.exp(rate) * softplus(own + shift)
        b = (1.0 / (1.0 + tl.exp(-b))).to(beta.dtype.element_ty).to(tl.float32)
    sees = seen_nodes(visible, req, nodes, num_nodes)
    total, since = decays(own, sees)
    overlap = tl.dot(k * b[:, None], tl.trans(k), input_precision=_PRECISION) * since
    state_at = (tl.load(slots + req) * num_heads + head) * key_dim * value_dim
    of_state = in_keys[:, None] & in_values[None, :]
    state = tl.load(states + state_at + keys[:, None] * value_dim + values[None, :], mask=of_state, other=0.0)
    state = state.to(tl.float32)
    reached = tl.exp(total)[:, None]
    added = (v - tl.dot(k, state, input_precision=_PRECISION) * reached) * b[:, None]
    for node in range(1, num_nodes):
        # Rows before `node` are final; `node` itself and later rows are masked out.
        row = tl.sum(tl.where((nodes == node)[:, None] & (nodes < node)[None, :], overlap, 0.0), axis=0)
        known = tl.sum(row[:, None] * added, axis=0)
        added = tl.where((nodes == node)[:, None], added - known[None, :], added)
    # Queries are loaded here, because before, registers would not hold them beside the keys and the state.
    q_at = query + req * query_strides[0] + key_head * query_strides[2]
    q = tl.load(q_at + nodes[:, None] * query_strides[1] + keys[None, :] * query_strides[3], mask=of_keys, other=0.0)
    q = q.to(tl.float32)
    if NORMED:
        q *= tl.rsqrt(tl.sum(q * q, axis=1) + epsilon)[:, None]
    q *= scale
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
    gates: tuple[Tensor, Tensor] | None = None,
    kept: Added | None = None,
) -> tuple[Tensor, Added]:
    """Launches the kernel for `reference.delta_rule`."""
    (num_reqs, num_nodes, num_heads, value_dim), (num_key_heads, key_dim) = value.shape, key.shape[2:]
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    keys, added, total = kept or new_added(key, value, decay)
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
                *(gates or (None, None)),
                NORMED=epsilon is not None,
                NODES=max(triton.next_power_of_2(num_nodes), _LEAST),
                KEYS=max(triton.next_power_of_2(key_dim), _LEAST),
                VALUES=columns,
                num_warps=4,
                **options(fused=True),
            )
    return out, Added(keys, added, total)


def new_added(left: Tensor, right: Tensor, decay: Tensor) -> Added:
    """Allocates additions of these shapes."""
    return Added(*(torch.empty(part.shape, dtype=torch.float32, device=part.device) for part in (left, right, decay)))


@triton.jit
def _selective_scan_kernel(
    inputs,
    dt,
    rates,  # [num_heads]
    into,
    out_of,
    states,  # [num_states, num_heads, head_dim, state_dim]
    slots,
    visible,
    biases,  # [num_heads], or None: step sizes are as given
    directs,  # [num_heads], or None
    out,  # float32 [num_reqs, num_nodes, num_heads, head_dim]
    out_added,  # float32, likewise
    out_into,  # float32 [num_reqs, num_nodes, num_groups, state_dim]
    out_decay,  # float32 [num_reqs, num_nodes, num_heads]
    input_strides,
    dt_strides,
    into_strides,
    out_of_strides,
    num_nodes,
    num_heads,
    num_groups,
    head_dim,
    state_dim,
    least,
    most,
    factor,
    NODES: tl.constexpr,
    STATES: tl.constexpr,
    VALUES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    req, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    per_group = num_heads // num_groups
    group = head // per_group
    nodes, values = tl.arange(0, NODES), part * VALUES + tl.arange(0, VALUES)
    real, in_values = nodes < num_nodes, values < head_dim
    of_values = real[:, None] & in_values[None, :]
    at = inputs + req * input_strides[0] + head * input_strides[2]
    x = tl.load(at + nodes[:, None] * input_strides[1] + values[None, :] * input_strides[3], mask=of_values, other=0.0)
    x = x.to(tl.float32)
    step = tl.load(dt + req * dt_strides[0] + head * dt_strides[2] + nodes * dt_strides[1], mask=real, other=0.0)
    if biases is not None:  # rounded where transformers rounds
        step = (step.to(tl.float32) * factor).to(step.dtype)
        bias = tl.load(biases + head).to(step.dtype).to(tl.float32)
        step = softplus((step.to(tl.float32) + bias).to(step.dtype).to(tl.float32)).to(step.dtype)
        step = tl.minimum(tl.maximum(step.to(tl.float32), least), most)
    step = tl.where(real, step.to(tl.float32), 0.0)
    own = -tl.exp(tl.load(rates + head).to(tl.float32)) * step
    total, since = decays(own, seen_nodes(visible, req, nodes, num_nodes))
    state_at = states + (tl.load(slots + req) * num_heads + head) * head_dim * state_dim
    into_at = into + req * into_strides[0] + group * into_strides[2]
    out_of_at = out_of + req * out_of_strides[0] + group * out_of_strides[2]
    shown, seen = tl.zeros([NODES, NODES], tl.float32), tl.zeros([NODES, VALUES], tl.float32)
    for start in tl.range(0, state_dim, STATES):  # in parts, because registers do not hold all
        dims = start + tl.arange(0, STATES)
        in_dims = dims < state_dim
        of_dims, of_state = real[:, None] & in_dims[None, :], in_dims[:, None] & in_values[None, :]
        b_at = into_at + nodes[:, None] * into_strides[1] + dims[None, :] * into_strides[3]
        b = tl.load(b_at, mask=of_dims, other=0.0).to(tl.float32)
        c_at = out_of_at + nodes[:, None] * out_of_strides[1] + dims[None, :] * out_of_strides[3]
        c = tl.load(c_at, mask=of_dims, other=0.0).to(tl.float32)
        state = tl.load(state_at + values[None, :] * state_dim + dims[:, None], mask=of_state, other=0.0)
        shown = tl.dot(c, tl.trans(b), shown, input_precision=_PRECISION)
        seen = tl.dot(c, state.to(tl.float32), seen, input_precision=_PRECISION)
        if (part == 0) & (head % per_group == 0):
            kept_at = ((req * num_nodes + nodes[:, None]) * num_groups + group) * state_dim + dims[None, :]
            tl.store(out_into + kept_at, b, mask=of_dims)
    added = x * step[:, None]
    seen = seen * tl.exp(total)[:, None] + tl.dot(shown * since, added, input_precision=_PRECISION)
    if directs is not None:
        seen += tl.load(directs + head).to(tl.float32) * x
    at = ((req * num_nodes + nodes[:, None]) * num_heads + head) * head_dim + values[None, :]
    tl.store(out + at, seen, mask=of_values)
    tl.store(out_added + at, added, mask=of_values)
    if part == 0:
        tl.store(out_decay + (req * num_nodes + nodes) * num_heads + head, total, mask=real)


def scans(into: Tensor) -> bool:
    """Whether a program's registers hold trees of this size; into is [num_reqs, num_nodes, num_groups, state_dim]."""
    return into.shape[1] <= MOST_NODES and into.shape[3] <= MOST_STATES


def selective_scan(
    inputs: Tensor,
    dt: Tensor,
    rate: Tensor,
    into: Tensor,
    out_of: Tensor,
    states: Tensor,
    rows: TreeRows,
    steps: Steps | None,
    direct: Tensor | None,
    kept: Added | None,
) -> tuple[Tensor, Added]:
    """Launches the kernel for `reference.selective_scan`."""
    (num_reqs, num_nodes, num_heads, head_dim), (num_groups, state_dim) = inputs.shape, into.shape[2:]
    out = torch.empty(inputs.shape, dtype=torch.float32, device=inputs.device)
    kept = kept or new_added(inputs, into, dt)
    columns = min(max(triton.next_power_of_2(head_dim), _LEAST), 32)
    given = Steps(rate) if steps is None else steps
    if out.numel():
        with torch.cuda.device_of(inputs):
            _selective_scan_kernel[(num_reqs, num_heads, triton.cdiv(head_dim, columns))](
                inputs,
                dt,
                rate,
                into,
                out_of,
                states,
                rows.slots,
                rows.visible.contiguous().view(torch.uint8),
                None if steps is None else steps.bias,
                direct,
                out,
                *kept,
                inputs.stride(),
                dt.stride(),
                into.stride(),
                out_of.stride(),
                num_nodes,
                num_heads,
                num_groups,
                head_dim,
                state_dim,
                *map(float, given.limits),
                float(given.factor),
                NODES=max(triton.next_power_of_2(num_nodes), _LEAST),
                STATES=min(max(triton.next_power_of_2(state_dim), _LEAST), _STATE_TILE),
                VALUES=columns,
                num_warps=4,
                **options(fused=True),
            )
    return out, kept


@triton.jit
def _advance_recurrence_kernel(
    states,  # [num_states, num_heads, num_rows, num_columns]
    left,  # float32 [num_nodes, num_left_heads, num_rows]
    right,  # float32 [num_nodes, num_right_heads, num_columns]
    decay,  # float32 [num_nodes, num_heads]
    slots,  # int64 [num_ends]; `lengths` and `targets` likewise
    nodes,  # int64 [num_ends, longest]
    lengths,
    targets,
    longest,
    times,
    num_heads,
    num_left_heads,
    num_right_heads,
    num_rows,
    num_columns,
    spare,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    req, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    left_head, right_head = head // (num_heads // num_left_heads), head // (num_heads // num_right_heads)
    at_row, at_column = tl.arange(0, ROWS), part * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = at_row < num_rows, at_column < num_columns
    of_state, place = in_rows[:, None] & in_columns[None, :], at_row[:, None] * num_columns + at_column[None, :]
    size = num_rows * num_columns
    before = tl.load(states + (tl.load(slots + req) * num_heads + head) * size + place, mask=of_state, other=0.0)
    # Every end of a state is computed by one program, which has read the state before it writes any end.
    for time in range(times):
        end = time * tl.num_programs(0) + req
        length = tl.load(lengths + end)
        last = tl.load(decay + tl.load(nodes + end * longest + length - 1) * num_heads + head)
        after = before.to(tl.float32) * tl.exp(last)
        for step in range(length):
            node = tl.load(nodes + end * longest + step)
            since = tl.exp(last - tl.load(decay + node * num_heads + head))
            own = tl.load(left + (node * num_left_heads + left_head) * num_rows + at_row, mask=in_rows, other=0.0)
            along = right + (node * num_right_heads + right_head) * num_columns + at_column
            after += (own * since)[:, None] * tl.load(along, mask=in_columns, other=0.0)[None, :]
        target = tl.load(targets + end)
        to = states + (target * num_heads + head) * size + place
        if target != spare:
            tl.store(to, after.to(states.dtype.element_ty), mask=of_state)


def advance_recurrence(added: Added, states: Tensor, path: Path) -> None:
    """Launches the kernel for `reference.advance_recurrence`."""
    (num_ends, longest), (num_heads, num_rows, num_columns) = path.rows.shape, states.shape[1:]
    rows, columns = triton.next_power_of_2(num_rows), min(triton.next_power_of_2(num_columns), 32)
    left, right, decay = (part.flatten(0, 1) for part in added)
    with torch.cuda.device_of(states):
        _advance_recurrence_kernel[(num_ends // path.times, num_heads, triton.cdiv(num_columns, columns))](
            states,
            left,
            right,
            decay,
            path.slots,
            path.rows,
            path.num_tokens,
            path.targets,
            longest,
            path.times,
            num_heads,
            left.shape[1],
            right.shape[1],
            num_rows,
            num_columns,
            path.spare,
            ROWS=rows,
            COLUMNS=columns,
            # No two warps hold the same element, so that none writes what another has yet to read.
            num_warps=max(1, min(4, rows * columns // 64)),
            **options(fused=True),
        )


@triton.jit
def _convolve_kernel(
    inputs,
    states,  # [num_states, channels, length]
    slots,
    windows,  # int64 [num_reqs, num_nodes, window]
    weight,  # [channels, WIDTH]
    bias,  # [channels], or None
    scale,  # float32 [channels], or None
    out,  # [num_reqs, num_nodes, channels]
    kept,  # likewise
    input_strides,
    num_nodes,
    channels,
    length,
    window,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    req, node = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = channel < channels
    dtype: tl.constexpr = out.dtype.element_ty
    row = req * num_nodes + node
    past = states + (tl.load(slots + req) * channels + channel) * length + length - window
    now = inputs + req * input_strides[0] + channel * input_strides[1]
    factor = 1.0 if scale is None else tl.load(scale + channel, mask=inside, other=0.0)
    total = tl.zeros([TILE], dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        # Inputs before the root are in the state. Masks are computed from vectors.
        at = tl.load(windows + row * window + window - WIDTH + tap) + 0 * channel
        before = tl.load(past + at, mask=inside & (at < window), other=0.0).to(dtype).to(tl.float32)
        own = tl.load(now + (at - window) * input_strides[2], mask=inside & (at >= window), other=0.0).to(tl.float32)
        own = (own * factor).to(dtype)
        taken = tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
        total += (before + own.to(tl.float32)) * taken
        if tap == WIDTH - 1:
            tl.store(kept + row * channels + channel, own, mask=inside)
    rounds: tl.constexpr = weight.dtype.element_ty
    total = total.to(rounds).to(tl.float32)
    if bias is not None:
        total = (total + tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)).to(rounds).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + row * channels + channel, total.to(dtype), mask=inside)


def convolve(
    inputs: Tensor,
    states: Tensor,
    rows: TreeRows,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    scale: Tensor | None,
    kept: Tensor,
) -> Tensor:
    """Launches the kernel for `reference.convolve`."""
    num_reqs, channels, num_nodes = inputs.shape
    out = torch.empty_like(kept)
    tile = min(_CHANNEL_TILE, triton.next_power_of_2(channels))
    if out.numel():
        with torch.cuda.device_of(inputs):
            _convolve_kernel[(num_reqs, num_nodes, triton.cdiv(channels, tile))](
                inputs,
                states,
                rows.slots,
                rows.windows,
                weight.contiguous(),
                None if bias is None else bias.contiguous(),
                None if scale is None else scale.contiguous(),
                out,
                kept,
                inputs.stride(),
                num_nodes,
                channels,
                states.shape[2],
                rows.windows.shape[2],
                WIDTH=weight.shape[1],
                SILU=silu,
                TILE=tile,
                num_warps=max(1, tile // 64),
                **options(fused=True),
            )
    return out.transpose(1, 2)


@triton.jit
def _advance_convolution_kernel(
    inputs,  # [num_nodes, channels]
    states,  # [num_states, channels, length]
    slots,  # int64 [num_ends]; `lengths` and `targets` likewise
    nodes,  # int64 [num_ends, longest]
    lengths,
    targets,
    longest,
    times,
    channels,
    length,
    spare,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    req, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channel < channels
    before = states + (tl.load(slots + req) * channels + channel) * length
    for time in range(times):
        end = time * tl.num_programs(0) + req
        num_tokens = tl.load(lengths + end)
        target = tl.load(targets + end)
        to = states + (target * channels + channel) * length
        # The last end may be the state itself: a later input is read before an earlier place is written.
        for place in range(length):
            at = num_tokens + place + 0 * channel
            node = tl.load(nodes + end * longest + at - length, mask=at >= length, other=0)
            past = tl.load(before + at, mask=inside & (at < length), other=0.0)
            own = tl.load(inputs + node * channels + channel, mask=inside & (at >= length), other=0.0)
            if target != spare:
                tl.store(to + place, past + own.to(past.dtype), mask=inside)


def advance_convolution(inputs: Tensor, states: Tensor, path: Path) -> None:
    """Launches the kernel for `reference.advance_convolution`."""
    (num_ends, longest), (channels, length) = path.rows.shape, states.shape[1:]
    tile = min(_CHANNEL_TILE, triton.next_power_of_2(channels))
    with torch.cuda.device_of(states):
        _advance_convolution_kernel[(num_ends // path.times, triton.cdiv(channels, tile))](
            inputs,
            states,
            path.slots,
            path.rows,
            path.num_tokens,
            path.targets,
            longest,
            path.times,
            channels,
            length,
            path.spare,
            TILE=tile,
            num_warps=max(1, tile // 64),
            **options(fused=True),
        )
