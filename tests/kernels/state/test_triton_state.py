"""The recurrences' kernels against their references, at odd sizes and in memory that held NaN."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.state.test_state_reference import trees
from wingbeat.kernels.state import reference, triton_channels
from wingbeat.kernels.state import triton as triton_state
from wingbeat.kernels.state.rows import ChannelParameters, Path, Steps, TreeRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [pytest.mark.few(2), pytest.mark.usefixtures("poisoned_memory")]
HEADS, GROUPS, WIDTH = 4, 2, 3


def drawn(num_reqs: int, num_nodes: int, width: int = 1):
    """A function that draws numbers of nodes, its generator, and trees that continue states in another order."""
    draw = torch.Generator().manual_seed(num_nodes)

    def numbers(*shape):
        return torch.randn(num_reqs, num_nodes, *shape, generator=draw)

    slots = torch.arange(num_reqs).flip(0)
    return numbers, draw, TreeRows.of(slots, trees(num_reqs, num_nodes), num_nodes - 1, width)


def placed(part):
    """Returns an argument with its tensors on the device."""
    if isinstance(part, TreeRows):
        return TreeRows(*map(placed, part))
    if isinstance(part, Steps):
        return part._replace(bias=placed(part.bias))
    if isinstance(part, ChannelParameters):
        return ChannelParameters(*map(placed, part))
    if isinstance(part, tuple):
        return tuple(map(placed, part))
    return part.to(DEVICE) if isinstance(part, torch.Tensor) else part


def check(ours, theirs, within: float = 2e-5):
    for own, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.cpu(), expected, atol=within, rtol=within)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "as-given"])
@pytest.mark.parametrize(
    ("num_reqs", "num_nodes", "key_dim", "value_dim"), [(2, 7, 12, 41), (1, 1, 16, 16), (3, 17, 20, 5)]
)
def test_the_delta_rule_is_its_reference(num_reqs, num_nodes, key_dim, value_dim, normed, gated):
    numbers, draw, rows = drawn(num_reqs, num_nodes)
    # As transformers cuts them out of one convolution: not one behind the other in memory.
    query, key = numbers(2, 2 * key_dim)[..., :key_dim], 0.3 * numbers(2, 2 * key_dim)[..., key_dim:]
    value, decay, beta = numbers(4, value_dim), numbers(4), numbers(4)
    if not gated:
        decay, beta = -decay.abs(), beta.sigmoid()
    states = torch.randn(num_reqs + 1, 4, key_dim, value_dim, generator=draw)
    gates = (torch.randn(4, generator=draw), torch.randn(4, generator=draw)) if gated else None
    given = (query, key, value, decay, beta, states, rows, 1e-6 if normed else None, gates)
    out, added = reference.delta_rule(*given)
    own, own_added = triton_state.delta_rule(*map(placed, given))
    check((own, *own_added), (out, *added))


@pytest.mark.parametrize("stepped", [True, False], ids=["steps", "as-given"])
@pytest.mark.parametrize(
    ("num_reqs", "num_nodes", "head_dim", "state_dim"), [(2, 7, 41, 12), (1, 1, 16, 16), (2, 13, 5, 20)]
)
def test_a_selective_scan_is_its_reference(num_reqs, num_nodes, head_dim, state_dim, stepped):
    numbers, draw, rows = drawn(num_reqs, num_nodes)
    inputs, dt = numbers(HEADS, head_dim + 3)[..., 3:], numbers(HEADS)
    both = 0.3 * numbers(GROUPS, 2 * state_dim)
    rate, bias, direct = torch.randn(3, HEADS, generator=draw)
    states = torch.randn(num_reqs + 1, HEADS, head_dim, state_dim, generator=draw)
    steps = Steps(4 * bias, (0.01, 0.9), 1.5) if stepped else None
    dt = dt if stepped else dt.abs()
    given = (inputs, dt, rate, both[..., :state_dim], both[..., state_dim:], states, rows, steps)
    given += (direct if stepped else None,)
    out, added = reference.selective_scan(*given)
    own, own_added = triton_state.selective_scan(*map(placed, given), None)
    check((own, *own_added), (out, *added))


@pytest.mark.parametrize(
    ("num_reqs", "num_nodes", "channels", "state_dim"), [(2, 7, 70, 12), (1, 1, 64, 16), (2, 13, 5, 3)]
)
def test_a_channel_scan_is_its_reference(num_reqs, num_nodes, channels, state_dim):
    numbers, draw, rows = drawn(num_reqs, num_nodes)
    inputs, gate = numbers(2 * channels).split(channels, dim=-1)
    dt, both = numbers(channels).transpose(1, 2).contiguous().transpose(1, 2), numbers(2 * state_dim)
    own = ChannelParameters(torch.randn(channels, state_dim, generator=draw), *torch.randn(2, channels, generator=draw))
    states = torch.randn(num_reqs + 1, channels, state_dim, generator=draw)
    given = (inputs, dt, gate, both[..., :state_dim], both[..., state_dim:], own)
    out, added = reference.channel_scan(*given, states, rows)
    result, own_added = triton_channels.channel_scan(*map(placed, given), placed(states), placed(rows), None)
    check((result, *own_added), (out, *added))
    prompts, passed = states[:num_reqs].to(DEVICE, copy=True), states[:num_reqs].clone()
    tokens = reference.scan_tokens(*given, passed)
    check((triton_channels.scan_tokens(*map(placed, given), prompts), prompts), (tokens, passed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("activated", [True, False], ids=["activated", "plain"])
@pytest.mark.parametrize(("num_reqs", "num_nodes", "channels", "length"), [(2, 7, 41, 4), (1, 1, 16, 3), (3, 17, 5, 5)])
def test_a_convolution_is_its_reference(num_reqs, num_nodes, channels, length, activated, dtype):
    numbers, draw, rows = drawn(num_reqs, num_nodes, length)
    inputs, weight = numbers(channels + 2).to(dtype)[..., 2:], torch.randn(channels, WIDTH, generator=draw).to(dtype)
    states = torch.randn(num_reqs + 1, channels, length, generator=draw).to(dtype)
    bias, scale = torch.randn(2, channels, generator=draw) if activated else (None, None)
    bias = None if bias is None else bias.to(dtype)
    given = (inputs.transpose(1, 2), states, rows, weight, bias, activated, scale)
    expected = reference.convolve(*given)
    kept = torch.empty(num_reqs, num_nodes, channels, dtype=dtype, device=DEVICE)
    out = triton_state.convolve(*map(placed, given), kept)
    check((out, kept), expected, 2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(("num_reqs", "num_nodes", "longest"), [(2, 7, 4), (1, 1, 1)])
def test_states_advance_as_by_the_references(num_reqs, num_nodes, longest, times):
    numbers, draw, _ = drawn(num_reqs, num_nodes)
    slots = torch.arange(num_reqs).flip(0)
    chosen = [torch.randperm(num_nodes, generator=draw)[:longest] for _ in range(num_reqs)]
    nodes = torch.stack(chosen) + torch.arange(num_reqs)[:, None] * num_nodes
    lengths = torch.cat([1 + torch.randint(longest, (num_reqs,), generator=draw) for _ in range(times)])
    # Copies of states go to rows of their own, and the states themselves come last.
    targets = torch.cat([num_reqs + torch.arange((times - 1) * num_reqs), slots])
    path = Path(slots.repeat(times), nodes.repeat(times, 1), lengths, targets, times)
    there = Path(*(placed(part) for part in (path.slots, path.rows, path.num_tokens, path.targets)), times)
    convolved = torch.randn(num_reqs * times, 19, 4, generator=draw)
    inputs, own = numbers(19), convolved.to(DEVICE, copy=True)
    reference.advance_convolution(inputs, convolved, path)
    triton_state.advance_convolution(placed(inputs), own, there)
    check((own,), (convolved,), 0.0)
    added = reference.Added(numbers(GROUPS, 7), numbers(HEADS, 35), -numbers(HEADS).abs())
    for ours in (added, reference.Added(added.right, added.left, added.decay)):
        states = torch.randn(num_reqs * times, HEADS, ours.left.shape[-1], ours.right.shape[-1], generator=draw)
        own = states.to(DEVICE, copy=True)
        reference.advance_recurrence(ours, states, path)
        triton_state.advance_recurrence(reference.Added(*map(placed, ours)), own, there)
        check((own,), (states,))
    added, rate = reference.Added(numbers(70), numbers(5), numbers(70).abs()), torch.randn(70, 5, generator=draw)
    states = torch.randn(num_reqs * times, 70, 5, generator=draw)
    own = states.to(DEVICE, copy=True)
    reference.advance_channels(added, rate, states, path)
    triton_channels.advance_channels(reference.Added(*map(placed, added)), placed(rate), own, there)
    check((own,), (states,))


def test_the_spare_row_is_not_written():
    """Padding rows, and copies that a path does not reach, have it as their target: several programs would race."""
    numbers, draw, _ = drawn(3, 1)
    slots, rows, targets = torch.tensor([0, 2, 2]), torch.arange(3)[:, None], torch.tensor([2, 2, 2, 0, 2, 2])
    given = (slots.repeat(2), rows.repeat(2, 1), torch.ones(6, dtype=torch.int64), targets)
    path, added = (
        Path(*map(placed, given), times=2, spare=2),
        reference.Added(numbers(1, 7), numbers(1, 5), -numbers(1)),
    )
    before = torch.randn(3, 1, 7, 5, generator=draw)
    states, past = before.to(DEVICE, copy=True), before[:, 0].to(DEVICE, copy=True)
    triton_state.advance_recurrence(reference.Added(*map(placed, added)), states, path)
    triton_state.advance_convolution(placed(numbers(7)), past, path)
    of_channels = before[:, 0].to(DEVICE, copy=True)
    parts = reference.Added(numbers(7), numbers(5), numbers(7).abs())
    triton_channels.advance_channels(
        reference.Added(*map(placed, parts)), placed(torch.randn(7, 5, generator=draw)), of_channels, path
    )
    checked = ((states, before), (past, before[:, 0]), (of_channels, before[:, 0]))
    for after, own in ((after.cpu(), own) for after, own in checked):
        assert torch.equal(after[1:], own[1:])
        assert not torch.equal(after[0], own[0])
