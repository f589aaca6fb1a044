"""Inner parts of mixers in a few steps over trees: convolution, recurrence, and gated norm, a launch each on a GPU.

transformers' code of the same mixers has an operation for each gate, cast and multiplier. A mixer uses its steps if a
trial gives transformers' numbers.
"""

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.kernels.layer.reference import gated_norm, rms_norm
from wingbeat.kernels.state.reference import channel_scan, convolve, delta_rule, selective_scan
from wingbeat.kernels.state.rows import Added, ChannelParameters, Steps, TreeRows

CONVOLUTION, RECURRENCE = (False, 0), (True, 0)
"""Parts of the states of these mixers, as in `StatePool.parts`."""
EPSILON = 1e-6
"""Value added to the sum of squares when queries and keys are L2-normalised."""
_SILU = ("silu", "swish")
_MAMBA1 = ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "time_step_rank", "ssm_state_size")
_MAMBA1_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
_MAMBA2 = ("in_proj", "conv1d", "dt_bias", "A_log", "D", "n_groups", "num_heads", "head_dim", "time_step_limit", "norm")
_DELTA_NETS = ("conv1d", "dt_bias", "A_log", "norm", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")


class MixerSteps(ABC):
    """Inner part of a mixer over trees.

    Args:
        module: the mixer.
        entries: names of the linear layers that multiply the mixer's input; their outputs follow the input.
    """

    def __init__(self, module: nn.Module, entries: list[str]) -> None:
        self.module: Any = module
        self.entries = entries

    @abstractmethod
    def kept(self) -> list[tuple[int, ...]]:
        """Returns the shapes, per node, of the convolved inputs and of `Added`, which a state advances by."""
        ...

    @abstractmethod
    def __call__(
        self, parts: list[Tensor], states: dict[tuple[bool, int], Tensor], rows: TreeRows, kept: list[Tensor]
    ) -> Tensor:
        """Returns the input of the mixer's last linear layer, [num_reqs, num_nodes, n].

        Args:
            parts: [num_reqs, num_nodes, ...]: the mixer's input, and the output of each layer of `entries`.
            kept: memory for the tensors of `kept`.
        """
        ...

    def _convolved(self, inputs: Tensor, states: Tensor, rows: TreeRows, kept: Tensor, scale: Tensor | None) -> Tensor:
        """Convolves and activates [num_reqs, num_nodes, channels]."""
        conv = self.module.conv1d
        weight, at = conv.weight.squeeze(1), inputs.transpose(1, 2)
        return convolve(at, states, rows, weight, conv.bias, True, scale, kept)[0].transpose(1, 2)


class Mamba1Steps(MixerSteps):
    """Mamba-1 (arXiv 2312.00752) with norms of step sizes, B and C, as in Jamba."""

    def kept(self) -> list[tuple[int, ...]]:
        """See `MixerSteps.kept`."""
        channels, state_dim = self.module.A_log.shape
        return [(channels,), (channels,), (state_dim,), (channels,)]

    def __call__(
        self, parts: list[Tensor], states: dict[tuple[bool, int], Tensor], rows: TreeRows, kept: list[Tensor]
    ) -> Tensor:
        """See `MixerSteps.__call__`."""
        mixer = self.module
        inputs, gate = (parts[1] if self.entries else mixer.in_proj(parts[0])).chunk(2, dim=-1)
        mixed = self._convolved(inputs, states[CONVOLUTION], rows, kept[0], None)
        sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
        norms = (getattr(mixer, name) for name in _MAMBA1_NORMS)
        projected = zip(mixer.x_proj(mixed).split(sizes, dim=-1), norms, strict=True)
        dt, into, out_of = (rms_norm(part, norm.weight, norm.variance_epsilon) for part, norm in projected)
        steps = functional.linear(dt, mixer.dt_proj.weight)
        own = ChannelParameters(mixer.A_log, mixer.dt_proj.bias, mixer.D)
        return channel_scan(mixed, steps, gate, into, out_of, own, states[RECURRENCE], rows, Added(*kept[1:]))[0]


class Mamba2Steps(MixerSteps):
    """Mamba-2 (arXiv 2405.21060) with an optional gated norm and optional multipliers of the projection's parts."""

    def __init__(self, module: nn.Module, entries: list[str]) -> None:
        super().__init__(module, entries)
        mixer, norm = self.module, self.module.norm
        self.inner, channels = mixer.num_heads * mixer.head_dim, mixer.conv1d.weight.shape[0]
        self.sizes = [self.inner, channels, mixer.num_heads]
        self.state_dim = (channels - self.inner) // (2 * mixer.n_groups)
        self.gate_factor = self.step_factor = 1.0
        self.scale: Tensor | None = None
        if hasattr(mixer, "mup_vector"):
            factors = mixer.mup_vector.flatten().float() * mixer.ssm_in_multiplier
            gates, self.scale, steps = factors.split(self.sizes)
            self.gate_factor, self.step_factor = float(gates[0]), float(steps[0])
        self.group_size = getattr(norm, "group_size", None) or self.inner // getattr(norm, "n_groups", 1)
        self.gate_first = not getattr(norm, "norm_before_gate", False)

    def kept(self) -> list[tuple[int, ...]]:
        """See `MixerSteps.kept`."""
        mixer = self.module
        added = (mixer.num_heads, mixer.head_dim), (mixer.n_groups, self.state_dim), (mixer.num_heads,)
        return [(self.sizes[1],), *added]

    def __call__(
        self, parts: list[Tensor], states: dict[tuple[bool, int], Tensor], rows: TreeRows, kept: list[Tensor]
    ) -> Tensor:
        """See `MixerSteps.__call__`."""
        mixer = self.module
        projected = parts[1] if self.entries else mixer.in_proj(parts[0])
        gate, inputs, dt = projected.split(self.sizes, dim=-1)
        if self.scale is not None and self.scale.device != inputs.device:
            self.scale = self.scale.to(inputs.device)
        mixed = self._convolved(inputs, states[CONVOLUTION], rows, kept[0], self.scale)
        inputs, into, out_of = mixed.split([self.inner, *[mixer.n_groups * self.state_dim] * 2], dim=-1)
        of_groups = (part.unflatten(-1, (mixer.n_groups, self.state_dim)) for part in (into, out_of))
        steps = Steps(mixer.dt_bias, mixer.time_step_limit, self.step_factor)
        inputs = inputs.unflatten(-1, (mixer.num_heads, mixer.head_dim))
        before = states[RECURRENCE]
        out, _ = selective_scan(inputs, dt, mixer.A_log, *of_groups, before, rows, steps, mixer.D, Added(*kept[1:]))
        weight, epsilon = getattr(mixer.norm, "weight", None), getattr(mixer.norm, "variance_epsilon", 0.0)
        out = out.flatten(2)
        return gated_norm(out, gate, weight, epsilon, self.group_size, self.gate_first, self.gate_factor)


class DeltaSteps(MixerSteps):
    """Gated delta net (arXiv 2412.06464), with projections apart or with queries, keys, values and gates in one."""

    def __init__(self, module: nn.Module, entries: list[str]) -> None:
        super().__init__(module, entries)
        mixer = self.module
        self.heads = (mixer.num_k_heads, mixer.head_k_dim), (mixer.num_v_heads, mixer.head_v_dim)
        keys, values = (num * dim for num, dim in self.heads)
        self.sizes = [keys, keys, values]
        self.order: list[Tensor] = []
        if len(entries) == 2:
            # A row of numbers is ordered as transformers orders a projection; the result is where each element lies.
            places = (torch.arange(mixer.get_submodule(name).out_features)[None, None] for name in entries)
            *joined, b, a = (part.flatten() for part in mixer.fix_query_key_value_ordering(*places))
            self.order = [torch.cat(joined), torch.cat([b, a])]

    def kept(self) -> list[tuple[int, ...]]:
        """See `MixerSteps.kept`."""
        keys, values = self.heads
        return [(sum(self.sizes),), keys, values, values[:1]]

    def __call__(
        self, parts: list[Tensor], states: dict[tuple[bool, int], Tensor], rows: TreeRows, kept: list[Tensor]
    ) -> Tensor:
        """See `MixerSteps.__call__`."""
        mixer, (keys, values) = self.module, self.heads
        if self.order:
            self.order = [at.to(parts[0].device) for at in self.order]
            joined, ba = (part.index_select(-1, at) for part, at in zip(parts[1:], self.order, strict=True))
            inputs, z = joined.split([sum(self.sizes), self.sizes[2]], dim=-1)
            b, a = ba.chunk(2, dim=-1)
        else:
            inputs, z, b, a = parts[1:]
        mixed = self._convolved(inputs, states[CONVOLUTION], rows, kept[0], None)
        query, key, value = mixed.split(self.sizes, dim=-1)
        query, key, value = query.unflatten(-1, keys), key.unflatten(-1, keys), value.unflatten(-1, values)
        gates, before = (mixer.A_log, mixer.dt_bias), states[RECURRENCE]
        out, _ = delta_rule(query, key, value, a, b, before, rows, EPSILON, gates, Added(*kept[1:]))
        norm = mixer.norm
        epsilon = norm.variance_epsilon
        return gated_norm(out, z.unflatten(-1, values), norm.weight, epsilon, values[1], False, 1.0).flatten(2)


def steps_of(module: nn.Module, entries: list[nn.Linear]) -> MixerSteps | None:
    """Returns the steps of a mixer; None if no class of this module has its parts."""
    if getattr(module, "activation", None) not in _SILU:
        return None
    by_module = {linear: name for name, linear in module.named_children()}
    names = [by_module.get(linear, "") for linear in entries]
    code = inspect.unwrap(type(module).forward).__code__.co_names
    if "mamba2_chunk_scan" in code and all(hasattr(module, name) for name in _MAMBA2) and names in ([], ["in_proj"]):
        return Mamba2Steps(module, names)
    if "mamba_selective_scan" in code and all(hasattr(module, name) for name in (*_MAMBA1, *_MAMBA1_NORMS)):
        return Mamba1Steps(module, names) if names in ([], ["in_proj"]) else None
    apart = [f"in_proj_{name}" for name in ("qkv", "z", "b", "a")], ["in_proj_qkvz", "in_proj_ba"]
    if "torch_chunk_gated_delta_rule" in code and all(hasattr(module, name) for name in _DELTA_NETS) and names in apart:
        return DeltaSteps(module, names)
    return None
