"""Launches of the recurrences over trees, for `compile_launches`."""

import torch

from wingbeat.kernels.state import triton as triton_state
from wingbeat.kernels.state import triton_channels
from wingbeat.kernels.state.rows import Added, ChannelParameters, Path, Steps, TreeRows


def launch_all() -> None:
    for num_nodes in (1, 16):
        launch_recurrences(4, num_nodes, (16, 32), 128)


def launch_recurrences(num_reqs: int, num_nodes: int, heads: tuple[int, int], dim: int) -> None:
    keys = torch.zeros(num_reqs, num_nodes, heads[0], dim, dtype=torch.bfloat16)
    value = keys.new_zeros(num_reqs, num_nodes, heads[1], dim)
    decay, states = torch.zeros(num_reqs, num_nodes, heads[1]), torch.zeros(num_reqs + 1, heads[1], dim, dim)
    parents = torch.zeros(num_reqs, num_nodes, dtype=torch.int64)
    rows, each, narrow = TreeRows.of(parents[:, 0], parents, 0, 4), decay[0, 0], decay.to(torch.bfloat16)
    for gates in (None, (each, each)):
        triton_state.delta_rule(keys, keys, value, decay, narrow, states, rows, 1e-6, gates)
    wide = keys.new_zeros(num_reqs, num_nodes, 1, 2 * dim)
    states = torch.zeros(num_reqs + 1, heads[1], dim // 2, 2 * dim)
    inputs = value[..., : dim // 2]
    _, added = triton_state.selective_scan(inputs, narrow, each, wide, wide, states, rows, Steps(each), each, None)
    path = Path(parents[:, 0], parents, parents[:, 0], parents[:, 0])
    triton_state.advance_recurrence(Added(*added), states, path)
    channels = keys.flatten(2)
    weight, past = channels.new_zeros(channels.shape[2], 4), channels.new_zeros(num_reqs + 1, channels.shape[2], 4)
    for scale in (None, past[0, :, 0].float()):
        given = (channels.transpose(1, 2), past, rows, weight, past[0, :, 0])
        triton_state.convolve(*given, True, scale, torch.empty_like(channels))
    triton_state.advance_convolution(channels, past, path)
    narrow, rate = keys[..., 0, :16], channels.new_zeros(channels.shape[2], 16).float()
    own, recurrent = ChannelParameters(rate, rate[:, 0], rate[:, 0]), past.new_zeros(num_reqs + 1, *rate.shape).float()
    given = (channels, channels, channels, narrow, narrow, own, recurrent)
    _, added = triton_channels.channel_scan(*given, rows, None)
    triton_channels.scan_tokens(*given)
    triton_channels.advance_channels(added, rate, recurrent, path)
