"""Comparisons of the recurrences with their references, for `wingbeat.kernels.gpu.comparison`."""

import torch
from torch import Tensor

from wingbeat.kernels.comparison_inputs import Shape, random_numbers
from wingbeat.kernels.state.reference import (
    advance_channels,
    advance_convolution,
    advance_recurrence,
    channel_scan,
    convolve,
    delta_rule,
    scan_tokens,
    selective_scan,
)
from wingbeat.kernels.state.rows import Added, ChannelParameters, Path, Steps, TreeRows


def _trees(device: torch.device) -> TreeRows:
    parents = torch.tensor([[-1, 0, 0, 1, 1, 3, 2], [-1, 0, 1, 2, 3, 4, 5]], device=device)
    return TreeRows.of(torch.tensor([2, 0], device=device), parents, 6, 4)


def _path(device: torch.device) -> Path:
    """Accepted paths of both trees; a copy of each state is saved on the way."""
    slots, nodes = torch.tensor([2, 0], device=device), torch.tensor([[0, 1, 3, 5], [7, 8, 9, 10]], device=device)
    lengths, targets = torch.tensor([2, 1, 4, 3], device=device), torch.tensor([3, 4, 2, 0], device=device)
    return Path(slots.repeat(2), nodes.repeat(2, 1), lengths, targets, times=2)


def over_trees(device: torch.device, shape: Shape) -> list[Tensor]:
    """Returns results of the gated delta rule over two trees on a device."""
    num_reqs, num_nodes, dim = 2, 7, min(shape.head_dim, 128)
    query, key = (random_numbers(seed, num_reqs, num_nodes, 2, dim, dtype=shape.dtype).to(device) for seed in (17, 18))
    value = random_numbers(19, num_reqs, num_nodes, 4, dim, dtype=shape.dtype).to(device)
    decay, beta = (random_numbers(seed, num_reqs, num_nodes, 4).to(device) for seed in (20, 21))
    states, gates = random_numbers(22, 3, 4, dim, dim).to(device), random_numbers(23, 2, 4).to(device)
    found: list[Tensor] = []
    for gated in (None, (gates[0], gates[1])):
        own = (-decay.abs(), beta.sigmoid()) if gated is None else (decay, beta)
        out, added = delta_rule(query, key, value, *own, states, _trees(device), 1e-6, gated)
        found += [out, *added]
    return found


def scans(device: torch.device, shape: Shape) -> list[Tensor]:
    """Returns results of a selective scan over two trees on a device."""
    dim = min(shape.head_dim, 128)
    inputs = random_numbers(27, 2, 7, 4, dim, dtype=shape.dtype).to(device)
    into, out_of = (random_numbers(seed, 2, 7, 2, 64, dtype=shape.dtype).to(device) for seed in (28, 29))
    dt, rate = random_numbers(30, 2, 7, 4, dtype=shape.dtype).to(device), random_numbers(31, 4).to(device)
    states, more = random_numbers(32, 3, 4, dim, 64).to(device), random_numbers(33, 2, 4).to(device)
    steps = Steps(more[0], (0.01, 1.0))
    out, added = selective_scan(inputs, dt, rate, into, out_of, states, _trees(device), steps, more[1])
    return [out, *added]


def convolutions(device: torch.device, shape: Shape) -> list[Tensor]:
    """Returns results of a convolution over two trees on a device, and the states that it leaves."""
    inputs = random_numbers(34, 2, 300, 7, dtype=shape.dtype).to(device)
    weight, states = (random_numbers(seed, 5, 300, 4, dtype=shape.dtype).to(device) for seed in (35, 36))
    out, kept = convolve(inputs, states, _trees(device), weight[0], weight[1, :, 0], silu=True)
    advance_convolution(kept, states, _path(device))
    return [out, kept, states]


def advances(device: torch.device, shape: Shape) -> list[Tensor]:
    """Returns recurrent states that accepted paths leave on a device."""
    left, right = (random_numbers(37 + groups, 2, 7, groups, 48).to(device) for groups in (2, 4))
    states, decay = random_numbers(42, 5, 4, 48, 48).to(device), random_numbers(43, 2, 7, 4).to(device)
    advance_recurrence(Added(left, right, -decay.abs()), states, _path(device))
    return [states]


def scans_by_channel(device: torch.device, shape: Shape) -> list[Tensor]:
    """Returns results of Mamba-1's recurrence on a device, over two trees and along sequences."""
    parts = [random_numbers(seed, 2, 7, 70, dtype=shape.dtype).to(device) for seed in (44, 45, 46)]
    parts += [random_numbers(seed, 2, 7, 16, dtype=shape.dtype).to(device) for seed in (47, 48)]
    rate, states = random_numbers(49, 70, 16).to(device), random_numbers(50, 5, 70, 16).to(device)
    own = ChannelParameters(rate, *random_numbers(51, 2, 70).to(device))
    out, added = channel_scan(*parts, own, states, _trees(device))
    prompts = states[:2].clone()
    passed = scan_tokens(*parts, own, prompts)
    advance_channels(added, rate, states, _path(device))
    return [out, *added, passed, prompts, states]


CASES = {
    "channel_scan": scans_by_channel,
    "delta_rule": over_trees,
    "selective_scan": scans,
    "convolve": convolutions,
    "advance_recurrence": advances,
}
