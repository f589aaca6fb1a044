"""Recurrences over trees equal recurrences along each path, token by token."""

import random

import pytest
import torch

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
from wingbeat.kernels.state.rows import ChannelParameters, Path, TreeRows

SHAPES = {"B1-N1": (1, 1), "B2-N7": (2, 7), "B3-N17": (3, 17)}
NUM_STATES, SLOTS = 5, (3, 0, 2)
HEADS, GROUPS, ROWS, COLUMNS, CHANNELS, WIDTH = 4, 2, 7, 5, 6, 4


def trees(num_reqs: int, num_nodes: int) -> torch.Tensor:
    chance = random.Random(num_nodes)
    return torch.tensor([[-1, *(chance.randrange(n) for n in range(1, num_nodes))] for _ in range(num_reqs)])


def path_to(parents: list[int], node: int) -> list[int]:
    return [*(path_to(parents, parents[node]) if node else []), node]


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def case(request):
    num_reqs, num_nodes = request.param
    parents, draw = trees(num_reqs, num_nodes), torch.Generator().manual_seed(num_nodes)

    def numbers(*shape):
        return torch.randn(num_reqs, num_nodes, *shape, generator=draw)

    slots = torch.tensor(SLOTS[:num_reqs])
    return parents.tolist(), slots, TreeRows.of(slots, parents, num_nodes - 1, WIDTH), numbers, draw


def check(parents, slots, rows, states, run, step, advance):
    """Outputs of the nodes, and states after every node, equal those of `step` along the node's path.

    Args:
        run: what `step` gives, of all nodes: [num_reqs, num_nodes, ...].
        step: state, request, node -> state, output.
    """
    for node in range(len(parents[0])):
        after = torch.full_like(states, float("nan"))
        after[: len(states)] = states
        paths = [path_to(tree, node) for tree in parents]
        longest = max(map(len, paths))
        first = range(0, len(parents) * len(parents[0]), len(parents[0]))
        nodes = [
            [at + start for at in path] + [0] * (longest - len(path)) for start, path in zip(first, paths, strict=True)
        ]
        advance(after, Path(slots, torch.tensor(nodes), torch.tensor([len(path) for path in paths]), slots))
        for req, path in enumerate(paths):
            state = states[slots[req]]
            for at in path:
                state, out = step(state, req, at)
            torch.testing.assert_close(run[req, node], out, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(after[slots[req]], state, atol=2e-5, rtol=2e-5)
        others = [row for row in range(len(states)) if row not in slots.tolist()]
        assert torch.equal(after[others], states[others])


def test_a_convolution_looks_back_along_the_path(case):
    parents, slots, rows, numbers, draw = case
    inputs, weight = numbers(CHANNELS), torch.randn(CHANNELS, WIDTH, generator=draw)
    bias, states = torch.randn(CHANNELS, generator=draw), torch.randn(NUM_STATES, CHANNELS, WIDTH, generator=draw)

    def step(state, req, node):
        state = torch.cat([state[:, 1:], inputs[req, node, :, None]], dim=1)
        return state, (state * weight).sum(1) + bias

    out = convolve(inputs.transpose(1, 2), states, rows, weight, bias)[0].transpose(1, 2)
    check(
        parents,
        slots,
        rows,
        states,
        out,
        step,
        lambda after, path: advance_convolution(inputs, after, path),
    )


def test_a_gated_delta_rule_follows_ancestors(case):
    parents, slots, rows, numbers, draw = case
    query, key, value = numbers(GROUPS, ROWS), numbers(GROUPS, ROWS), numbers(HEADS, COLUMNS)
    key = key / key.norm(dim=-1, keepdim=True)
    decay, beta = -numbers(HEADS).abs(), numbers(HEADS).sigmoid()
    states = torch.randn(NUM_STATES, HEADS, ROWS, COLUMNS, generator=draw)

    def step(state, req, node):
        k, q = (part[req, node].repeat_interleave(HEADS // GROUPS, 0) for part in (key, query))
        state = state * decay[req, node].exp()[:, None, None]
        delta = (value[req, node] - (state * k[..., None]).sum(1)) * beta[req, node][:, None]
        state = state + k[..., None] * delta[:, None]
        return state, (state * q[..., None]).sum(1) * ROWS**-0.5

    out, added = delta_rule(query, key, value, decay, beta, states, rows)
    check(parents, slots, rows, states, out, step, lambda after, path: advance_recurrence(added, after, path))


def test_a_selective_scan_follows_ancestors(case):
    parents, slots, rows, numbers, draw = case
    inputs, steps = numbers(HEADS, ROWS), numbers(HEADS).abs() + 0.1
    into, out_of = numbers(GROUPS, COLUMNS), numbers(GROUPS, COLUMNS)
    rate, states = -torch.rand(HEADS, generator=draw), torch.randn(NUM_STATES, HEADS, ROWS, COLUMNS, generator=draw)

    def step(state, req, node):
        b, c = (part[req, node].repeat_interleave(HEADS // GROUPS, 0) for part in (into, out_of))
        dt = steps[req, node]
        state = state * (dt * rate).exp()[:, None, None]
        state = state + (dt[:, None] * inputs[req, node])[..., None] * b[:, None]
        return state, (state * c[:, None]).sum(-1)

    out, added = selective_scan(inputs, steps, (-rate).log(), into, out_of, states, rows)
    check(parents, slots, rows, states, out, step, lambda after, path: advance_recurrence(added, after, path))


def test_a_channel_scan_follows_ancestors(case):
    parents, slots, rows, numbers, draw = case
    inputs, dt, gate = numbers(CHANNELS), numbers(CHANNELS), numbers(CHANNELS)
    into, out_of = numbers(COLUMNS), numbers(COLUMNS)
    rate, (bias, direct) = torch.randn(CHANNELS, COLUMNS, generator=draw), torch.randn(2, CHANNELS, generator=draw)
    states = torch.randn(NUM_STATES, CHANNELS, COLUMNS, generator=draw)

    def step(state, req, node):
        size = (1 + (dt[req, node] + bias).exp()).log()[:, None]
        state = state * (-size * rate.exp()).exp() + size * inputs[req, node, :, None] * into[req, node]
        out = (state * out_of[req, node]).sum(1) + direct * inputs[req, node]
        return state, out * gate[req, node] * gate[req, node].sigmoid()

    own = ChannelParameters(rate, bias, direct)
    out, added = channel_scan(inputs, dt, gate, into, out_of, own, states, rows)
    check(parents, slots, rows, states, out, step, lambda after, path: advance_channels(added, rate, after, path))
    # A sequence of tokens is a tree of one path.
    chains = TreeRows.of(slots, torch.arange(inputs.shape[1]).expand(len(slots), -1) - 1, inputs.shape[1] - 1, WIDTH)
    expected, _ = channel_scan(inputs, dt, gate, into, out_of, own, states, chains)
    torch.testing.assert_close(scan_tokens(inputs, dt, gate, into, out_of, own, states[slots]), expected)
