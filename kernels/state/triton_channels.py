"""Mamba-1's recurrence on a GPU, over draft trees and over prompts; the reference is `reference.channel_scan`.

A program follows one path for a part of the channels, with the state in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.state.rows import Added, ChannelParameters, Path, TreeRows
from wingbeat.kernels.state.triton import softplus

_TILE = 64
_NUM_WARPS = 2


@triton.jit
def _channel_scan_kernel(
    inputs,  # [num_seqs, num_tokens, channels]; dt and gate likewise
    dt,
    gate,
    rates,  # [channels, state_dim]
    biases,  # [channels]
    directs,  # [channels]
    into,  # [num_seqs, num_tokens, state_dim]; out_of likewise
    out_of,
    states,  # [num_states, channels, state_dim]
    slots,  # int64 [num_seqs]; None for prompts, whose states lie in order and advance
    visible,  # uint8 [num_seqs, num_tokens, num_tokens], or None for prompts
    out,  # [num_seqs, num_tokens, channels]
    out_left,  # float32, likewise; None for prompts, as are the next two
    out_right,  # float32 [num_seqs, num_tokens, state_dim]
    out_steps,  # float32 [num_seqs, num_tokens, channels]
    input_strides,
    dt_strides,
    gate_strides,
    into_strides,
    out_of_strides,
    num_tokens,
    channels,
    state_dim,
    STATES: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    seq, node, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    channel, dims = part * TILE + tl.arange(0, TILE), tl.arange(0, STATES)
    inside, in_dims = channel < channels, dims < state_dim
    of_state, place = inside[:, None] & in_dims[None, :], channel[:, None] * state_dim + dims[None, :]
    rate = -tl.exp(tl.load(rates + place, mask=of_state, other=0.0).to(tl.float32))
    bias = tl.load(biases + channel, mask=inside, other=0.0).to(dt.dtype.element_ty).to(tl.float32)
    direct = tl.load(directs + channel, mask=inside, other=0.0).to(tl.float32)
    slot = seq if slots is None else tl.load(slots + seq)
    state_at = states + slot * channels * state_dim + place
    state = tl.load(state_at, mask=of_state, other=0.0).to(tl.float32)
    for token in range(num_tokens if visible is None else node + 1):
        sees = 1 if visible is None else tl.load(visible + (seq * num_tokens + node) * num_tokens + token)
        if sees != 0:
            x_at = inputs + seq * input_strides[0] + token * input_strides[1] + channel * input_strides[2]
            x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
            dt_at = dt + seq * dt_strides[0] + token * dt_strides[1] + channel * dt_strides[2]
            shifted = tl.load(dt_at, mask=inside, other=0.0).to(tl.float32) + bias
            # Rounded where transformers rounds.
            step = softplus(shifted.to(dt.dtype.element_ty).to(tl.float32)).to(dt.dtype.element_ty).to(tl.float32)
            b_at = into + seq * into_strides[0] + token * into_strides[1] + dims * into_strides[2]
            b = tl.load(b_at, mask=in_dims, other=0.0).to(tl.float32)
            left = step * x
            state = state * tl.exp(step[:, None] * rate) + left[:, None] * b[None, :]
            if (visible is None) | (token == node):
                c_at = out_of + seq * out_of_strides[0] + token * out_of_strides[1] + dims * out_of_strides[2]
                c = tl.load(c_at, mask=in_dims, other=0.0).to(tl.float32)
                gate_at = gate + seq * gate_strides[0] + token * gate_strides[1] + channel * gate_strides[2]
                z = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
                y = (tl.sum(state * c[None, :], axis=1) + direct * x) * z / (1.0 + tl.exp(-z))
                row = seq * num_tokens + token
                tl.store(out + row * channels + channel, y.to(out.dtype.element_ty), mask=inside)
                if visible is not None:
                    tl.store(out_left + row * channels + channel, left, mask=inside)
                    tl.store(out_steps + row * channels + channel, step, mask=inside)
                    if part == 0:
                        tl.store(out_right + row * state_dim + dims, b, mask=in_dims)
    if visible is None:
        tl.debug_barrier()
        tl.store(state_at, state.to(states.dtype.element_ty), mask=of_state)


def channel_scan(
    inputs: Tensor,
    dt: Tensor,
    gate: Tensor,
    into: Tensor,
    out_of: Tensor,
    own: ChannelParameters,
    states: Tensor,
    rows: TreeRows,
    kept: Added | None,
) -> tuple[Tensor, Added]:
    """Launches the kernel for `reference.channel_scan`."""
    if kept is None:
        kept = Added(*(torch.empty(part.shape, dtype=torch.float32, device=part.device) for part in (inputs, into, dt)))
    visible = rows.visible.contiguous().view(torch.uint8)
    return _launch(inputs, dt, gate, into, out_of, own, states, rows.slots, visible, kept), kept


def scan_tokens(
    inputs: Tensor, dt: Tensor, gate: Tensor, into: Tensor, out_of: Tensor, own: ChannelParameters, states: Tensor
) -> Tensor:
    """Launches the kernel for `reference.scan_tokens`."""
    return _launch(inputs, dt, gate, into, out_of, own, states, None, None, (None, None, None))


def _launch(
    inputs: Tensor,
    dt: Tensor,
    gate: Tensor,
    into: Tensor,
    out_of: Tensor,
    own: ChannelParameters,
    states: Tensor,
    slots: Tensor | None,
    visible: Tensor | None,
    kept: Added | tuple[None, None, None],
) -> Tensor:
    num_seqs, num_tokens, channels = inputs.shape
    out = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    if out.numel():
        with torch.cuda.device_of(inputs):
            _channel_scan_kernel[(num_seqs, 1 if visible is None else num_tokens, triton.cdiv(channels, _TILE))](
                inputs,
                dt,
                gate,
                *own,
                into,
                out_of,
                states,
                slots,
                visible,
                out,
                *kept,
                inputs.stride(),
                dt.stride(),
                gate.stride(),
                into.stride(),
                out_of.stride(),
                num_tokens,
                channels,
                states.shape[2],
                STATES=triton.next_power_of_2(states.shape[2]),
                TILE=_TILE,
                num_warps=_NUM_WARPS,
                **options(fused=True),
            )
    return out


@triton.jit
def _advance_channels_kernel(
    states,  # [num_states, channels, state_dim]
    rates,  # [channels, state_dim]
    left,  # float32 [num_nodes, channels]; steps likewise
    right,  # float32 [num_nodes, state_dim]
    steps,
    slots,  # int64 [num_ends]; `lengths` and `targets` likewise
    nodes,  # int64 [num_ends, longest]
    lengths,
    targets,
    longest,
    times,
    channels,
    state_dim,
    spare,
    STATES: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    req, channel, dims = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1) * TILE + tl.arange(0, TILE),
        tl.arange(0, STATES),
    )
    inside, in_dims = channel < channels, dims < state_dim
    of_state, place = inside[:, None] & in_dims[None, :], channel[:, None] * state_dim + dims[None, :]
    rate = -tl.exp(tl.load(rates + place, mask=of_state, other=0.0).to(tl.float32))
    size = channels * state_dim
    before = tl.load(states + tl.load(slots + req) * size + place, mask=of_state, other=0.0)
    # Every end of a state is computed by one program, which has read the state before it writes any end.
    tl.debug_barrier()
    for time in range(times):
        end = time * tl.num_programs(0) + req
        after = before.to(tl.float32)
        for at in range(tl.load(lengths + end)):
            node = tl.load(nodes + end * longest + at)
            step = tl.load(steps + node * channels + channel, mask=inside, other=0.0)
            own = tl.load(left + node * channels + channel, mask=inside, other=0.0)
            b = tl.load(right + node * state_dim + dims, mask=in_dims, other=0.0)
            after = after * tl.exp(step[:, None] * rate) + own[:, None] * b[None, :]
        target = tl.load(targets + end)
        if target != spare:
            tl.store(states + target * size + place, after.to(states.dtype.element_ty), mask=of_state)


def advance_channels(added: Added, rate: Tensor, states: Tensor, path: Path) -> None:
    """Launches the kernel for `reference.advance_channels`."""
    (num_ends, longest), (channels, state_dim) = path.rows.shape, states.shape[1:]
    left, right, steps = (part.flatten(0, 1) for part in added)
    with torch.cuda.device_of(states):
        _advance_channels_kernel[(num_ends // path.times, triton.cdiv(channels, _TILE))](
            states,
            rate,
            left,
            right,
            steps,
            path.slots,
            path.rows,
            path.num_tokens,
            path.targets,
            longest,
            path.times,
            channels,
            state_dim,
            path.spare,
            STATES=triton.next_power_of_2(state_dim),
            TILE=_TILE,
            num_warps=_NUM_WARPS,
            **options(fused=True),
        )
