"""Recurrences over draft trees: torch reference and CPU path.

The nodes of a tree continue one state, which is not modified. The state at a node is the tree's state times the decay
along the path, plus, for each ancestor, the ancestor's addition times the decay since the ancestor. All nodes are
therefore computed at once, as attention to ancestors, and no node needs a state of its own (gated delta rule: arXiv
2412.06464, with ancestors in place of earlier tokens; Mamba-2: arXiv 2405.21060). When a path is accepted, its
additions are applied to the state.

Mamba-1's decays differ by channel and dimension of the state, so its nodes are computed one after another. No function
has data-dependent shapes or waits for the device, so all can be captured.
"""

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn import functional

from wingbeat.kernels import choice
from wingbeat.kernels.state.rows import Added, ChannelParameters, Path, Steps, TreeRows


def convolve(
    inputs: Tensor,
    states: Tensor,
    rows: TreeRows,
    weight: Tensor,
    bias: Tensor | None = None,
    silu: bool = False,
    scale: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution along each node's path: [num_reqs, channels, num_nodes], and the convolved inputs.

    Args:
        inputs: [num_reqs, channels, num_nodes].
        states: [num_states, channels, length]: latest inputs before the root.
        weight: [channels, width].
        silu: whether the result passes through SiLU.
        scale: float32 [channels]: factors of the inputs, applied before the convolution; None applies none.
        kept: [num_reqs, num_nodes, channels], contiguous: memory for the second result; None allocates it.
    """
    kept = inputs.new_empty(inputs.transpose(1, 2).shape) if kept is None else kept
    if kernels := choice.compiled("convolve", inputs):
        return kernels.convolve(inputs, states, rows, weight, bias, silu, scale, kept), kept
    if scale is not None:
        inputs = (inputs * scale[:, None]).to(inputs.dtype)
    kept.copy_(inputs.transpose(1, 2))
    whole = torch.cat([states[rows.slots].to(inputs.dtype), inputs], dim=2)
    at = rows.windows[..., -weight.shape[1] :].flatten(1)
    if states.shape[2] != rows.windows.shape[2]:
        at = at + (states.shape[2] - rows.windows.shape[2])
    around = whole.gather(2, at[:, None].expand(-1, whole.shape[1], -1)).unflatten(2, (inputs.shape[2], -1))
    out = torch.einsum("bcnw,cw->bcn", around.to(weight.dtype), weight)
    out = out if bias is None else out + bias[:, None]
    return (functional.silu(out) if silu else out).to(inputs.dtype), kept


def advance_convolution(inputs: Tensor, states: Tensor, path: Path) -> None:
    """Advances convolution states [num_states, channels, length] along accepted paths, in place.

    Args:
        inputs: [num_reqs, num_nodes, channels], contiguous.
    """
    if kernels := choice.compiled("convolve", inputs):
        return kernels.advance_convolution(inputs, states, path)
    taken = inputs.flatten(0, 1)[path.rows].transpose(1, 2)
    whole = torch.cat([states[path.slots], taken.to(states.dtype)], dim=2)
    at = path.latest(states.shape[2])[:, None].expand(-1, states.shape[1], -1)
    states.index_copy_(0, path.targets, whole.gather(2, at))


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    rows: TreeRows,
    epsilon: float | None = None,
    gates: tuple[Tensor, Tensor] | None = None,
    kept: Added | None = None,
) -> tuple[Tensor, Added]:
    """Gated delta rule at every node: outputs [num_reqs, num_nodes, num_heads, value_dim], and the nodes' additions.

    Queries are divided by the square root of key_dim.

    Args:
        query, key: [num_reqs, num_nodes, num_key_heads, key_dim]; each key head serves several value heads.
        value: [num_reqs, num_nodes, num_heads, value_dim].
        decay: [num_reqs, num_nodes, num_heads], logarithms of the decay factors.
        beta: [num_reqs, num_nodes, num_heads].
        states: [num_states, num_heads, key_dim, value_dim].
        epsilon: normalises queries and keys to unit length first, with this added to their squared lengths; None leaves
            them unchanged.
        gates: [num_heads] each, a and b: the decays are -exp(a) * softplus(decay + b) and the betas sigmoid(beta); None
            takes decays and betas as they are.
        kept: contiguous memory for the additions; None allocates it.
    """
    if (kernels := choice.compiled("delta_rule", value)) and kernels.fits(query):
        return kernels.delta_rule(query, key, value, decay, beta, states, rows, epsilon, gates, kept)
    dtype = value.dtype
    if gates is not None:
        rate, shift = (part.float() for part in gates)
        decay, beta = -rate.exp() * functional.softplus(decay.float() + shift), beta.sigmoid()
    query, key, value, decay, beta = (part.float() for part in (query, key, value, decay, beta))
    if epsilon is not None:
        query, key = (part * torch.rsqrt((part * part).sum(dim=-1, keepdim=True) + epsilon) for part in (query, key))
    query = query * query.shape[-1] ** -0.5
    total, since = _decays(decay, rows)
    before = states[rows.slots].float()
    own_keys, own_queries = (_per_head(part, value.shape[2]) for part in (key, query))
    reached = total.exp()[..., None]
    known = torch.einsum("bnhk,bhkv->bnhv", own_keys, before) * reached
    wanted = (value - known) * beta[..., None]
    if value.shape[1] > 1:
        overlap = torch.einsum("bnhk,bmhk->bhnm", own_keys * beta[..., None], own_keys) * since
        # With `unitriangular` the solver ignores the diagonal and takes it as ones.
        wanted = solve_triangular(overlap, wanted.transpose(1, 2), upper=False, unitriangular=True)
        wanted = wanted.transpose(1, 2)
    seen = torch.einsum("bnhk,bmhk->bhnm", own_queries, own_keys) * since
    out = torch.einsum("bnhk,bhkv->bnhv", own_queries, before) * reached
    out = (out + torch.einsum("bhnm,bmhv->bnhv", seen, wanted)).to(dtype)
    return out, Added(key, wanted, total).copied(kept)


def selective_scan(
    inputs: Tensor,
    dt: Tensor,
    rate: Tensor,
    into: Tensor,
    out_of: Tensor,
    states: Tensor,
    rows: TreeRows,
    steps: Steps | None = None,
    direct: Tensor | None = None,
    kept: Added | None = None,
) -> tuple[Tensor, Added]:
    """Mamba-2's recurrence at every node: float32 [num_reqs, num_nodes, num_heads, head_dim], and the nodes' additions.

    Args:
        inputs: [num_reqs, num_nodes, num_heads, head_dim].
        dt: [num_reqs, num_nodes, num_heads]: step sizes, above 0.
        rate: [num_heads]: logarithms of minus the rates of decay.
        into, out_of: [num_reqs, num_nodes, num_groups, state_dim]; each group serves several heads.
        states: [num_states, num_heads, head_dim, state_dim].
        steps: how step sizes follow from `dt`; None takes them as they are.
        direct: [num_heads]: factors of the inputs that are added to the outputs; None adds nothing.
        kept: contiguous memory for the additions; None allocates it.
    """
    if (kernels := choice.compiled("selective_scan", inputs)) and kernels.scans(into):
        return kernels.selective_scan(inputs, dt, rate, into, out_of, states, rows, steps, direct, kept)
    dt = dt if steps is None else steps.of(dt)
    inputs, dt, into, out_of = (part.float() for part in (inputs, dt, into, out_of))
    total, since = _decays(-dt * rate.float().exp(), rows)
    added, before, num_heads = inputs * dt[..., None], states[rows.slots].float(), inputs.shape[2]
    own_into, own_out = (_per_head(part, num_heads) for part in (into, out_of))
    seen = torch.einsum("bnhs,bmhs->bhnm", own_out, own_into) * since
    out = torch.einsum("bhps,bnhs->bnhp", before, own_out) * total.exp()[..., None]
    out = out + torch.einsum("bhnm,bmhp->bnhp", seen, added)
    out = out if direct is None else out + direct[:, None].float() * inputs
    return out, Added(added, into, total).copied(kept)


def channel_scan(
    inputs: Tensor,
    dt: Tensor,
    gate: Tensor,
    into: Tensor,
    out_of: Tensor,
    own: ChannelParameters,
    states: Tensor,
    rows: TreeRows,
    kept: Added | None = None,
) -> tuple[Tensor, Added]:
    """Mamba-1's recurrence at every node: [num_reqs, num_nodes, channels] times silu(gate), and the nodes' additions.

    Args:
        inputs, dt, gate: [num_reqs, num_nodes, channels]; step sizes are softplus(dt + bias).
        into, out_of: [num_reqs, num_nodes, state_dim].
        states: [num_states, channels, state_dim].
        kept: contiguous memory for the additions; None allocates it.
    """
    if kernels := choice.compiled("channel_scan", inputs):
        return kernels.channel_scan(inputs, dt, gate, into, out_of, own, states, rows, kept)
    added = _channel_additions(inputs, dt, into, own)
    # A state per node: the states before a node are those of all nodes that descend from it.
    state = states[rows.slots].float()[:, None].expand(-1, inputs.shape[1], -1, -1)
    for node in range(inputs.shape[1]):
        after = _after(state, own.rate, *(part[:, node, None] for part in added))
        state = torch.where(rows.visible[:, :, node, None, None], after, state)
    return _channel_outputs(state, inputs, gate, out_of, own), added.copied(kept)


def scan_tokens(
    inputs: Tensor, dt: Tensor, gate: Tensor, into: Tensor, out_of: Tensor, own: ChannelParameters, states: Tensor
) -> Tensor:
    """Mamba-1's recurrence along sequences, whose states [num_seqs, channels, state_dim] advance in place.

    For the other arguments see `channel_scan`, with tokens in place of nodes.
    """
    if kernels := choice.compiled("channel_scan", inputs):
        return kernels.scan_tokens(inputs, dt, gate, into, out_of, own, states)
    added, state, passed = _channel_additions(inputs, dt, into, own), states.float(), []
    for token in range(inputs.shape[1]):
        state = _after(state, own.rate, *(part[:, token] for part in added))
        passed.append(_channel_outputs(state, inputs[:, token], gate[:, token], out_of[:, token], own))
    states.copy_(state)
    return torch.stack(passed, dim=1)


def advance_channels(added: Added, rate: Tensor, states: Tensor, path: Path) -> None:
    """Advances Mamba-1's states [num_states, channels, state_dim] by the additions of a path's nodes, in place."""
    if kernels := choice.compiled("channel_scan", states):
        return kernels.advance_channels(added, rate, states, path)
    parts, state = [part.flatten(0, 1)[path.rows] for part in added], states[path.slots].float()
    for node in range(path.rows.shape[1]):
        after = _after(state, rate, *(part[:, node] for part in parts))
        state = torch.where(path.skipped[:, node, :, None], state, after)
    states.index_copy_(0, path.targets, state.to(states.dtype))


def _channel_additions(inputs: Tensor, dt: Tensor, into: Tensor, own: ChannelParameters) -> Added:
    """Additions of nodes or tokens: step sizes times inputs, `into`, and the step sizes."""
    steps = functional.softplus(dt + own.bias.to(dt.dtype)).float()
    return Added(steps * inputs.float(), into.float(), steps)


def _after(state: Tensor, rate: Tensor, left: Tensor, right: Tensor, steps: Tensor) -> Tensor:
    """Mamba-1's states [..., channels, state_dim] after one node or token."""
    return state * torch.exp(steps[..., None] * -rate.float().exp()) + left[..., None] * right[..., None, :]


def _channel_outputs(state: Tensor, inputs: Tensor, gate: Tensor, out_of: Tensor, own: ChannelParameters) -> Tensor:
    """Gated outputs [..., channels] of states."""
    out = (state * out_of.float()[..., None, :]).sum(-1) + own.direct.float() * inputs.float()
    return (out * functional.silu(gate.float())).to(inputs.dtype)


def advance_recurrence(added: Added, states: Tensor, path: Path) -> None:
    """Advances recurrent states [num_states, num_heads, rows, columns] by the additions of a path's nodes, in place."""
    if kernels := choice.compiled("advance_recurrence", states):
        return kernels.advance_recurrence(added, states, path)
    left, right, decay = (part.flatten(0, 1) for part in added)
    end = decay[path.ends]
    since = (end - decay[path.rows]).masked_fill(path.skipped, float("-inf")).exp()
    own_left, own_right = (_per_head(part[path.rows], states.shape[1]) for part in (left, right))
    taken = torch.einsum("blhr,blhc->bhrc", own_left * since[..., None], own_right)
    after = torch.addcmul(taken, states[path.slots].float(), end[:, 0, :, None, None].exp())
    states.index_copy_(0, path.targets, after.to(states.dtype))


def _decays(decay: Tensor, rows: TreeRows) -> tuple[Tensor, Tensor]:
    """Cumulative decays along paths.

    Returns:
        The logarithm of the decay from the state to each node, [num_reqs, num_nodes, num_heads]; and the decay factor
            from each column node to each row node, [num_reqs, num_heads, num_nodes, num_nodes], which is 0 if the
            column node is no ancestor.
    """
    visible = rows.visible
    total = torch.einsum("bnm,bmh->bnh", visible.to(decay.dtype), decay)
    along = total.transpose(1, 2)
    since = (along[..., :, None] - along[..., None, :]).masked_fill(~visible[:, None], float("-inf"))
    return total, since.exp()


def _per_head(part: Tensor, num_heads: int) -> Tensor:
    """Repeats groups over their heads: [num_reqs, n, groups, dim] -> [num_reqs, n, num_heads, dim]."""
    times = num_heads // part.shape[2]
    return part if times == 1 else part.repeat_interleave(times, dim=2, output_size=num_heads)
