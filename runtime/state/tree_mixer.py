"""Mixers whose recurrences run over whole trees: all nodes at once, starting from one unchanged state.

The mixer's inner part is computed in steps (`mixer_steps`), or else by transformers' own forward, in which convolution
and recurrence are replaced by functions of `wingbeat.kernels.state`. A node follows its ancestors in the tree instead
of the tokens before it.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from wingbeat.kernels.state.reference import (
    advance_channels,
    advance_convolution,
    advance_recurrence,
    channel_scan,
    convolve,
    delta_rule,
    selective_scan,
)
from wingbeat.kernels.state.rows import Added, ChannelParameters, Path, Steps, TreeRows
from wingbeat.runtime.state.mixer import Mixer, copied
from wingbeat.runtime.state.mixer_steps import CONVOLUTION, EPSILON, RECURRENCE, steps_of
from wingbeat.runtime.state.pool import LayerState, StatePool
from wingbeat.runtime.state.round_states import AcceptedStates, DecodeStates, KeptRows, RoundStates
from wingbeat.runtime.verifier.layers.trial import TOLERANCE

logger = logging.getLogger(__name__)
_CONVOLUTION = "causal_conv1d_fn"


class TreeView:
    """A mixer's cache during a pass over trees: returns no states, and collects the nodes' contributions to the states.

    Args:
        states: the layer's state, as `StatePool.parts` returns it.
    """

    def __init__(self, states: dict[tuple[bool, int], Tensor], rows: TreeRows) -> None:
        self.states, self.rows = states, rows
        self.left: dict[tuple[bool, int], tuple[Tensor, ...]] = {}
        """Contributions of the nodes, by part of the state: tensors [num_reqs, num_nodes, ...]."""
        self._convolved = 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Returns None, like a cache before the first token, because `convolve` reads the past inputs itself."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Returns None, like a cache before the first token, because the recurrence reads the state itself."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Stores which convolution runs next; returns the inputs [num_reqs, channels, num_nodes] unchanged."""
        self._convolved = state_idx
        return conv_states

    def update_recurrent_state(self, recurrent_states: None, layer_idx: int, state_idx: int = 0) -> None:
        """Does nothing, because states advance only after the accepted path is known."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether states before the latest are recorded; always False."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there are states; always True."""
        return True

    def convolve(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
    ) -> Tensor:
        """Replaces transformers' `causal_conv1d_fn` in the mixer's forward."""
        part = False, self._convolved
        out, kept = convolve(inputs, self.states[part], self.rows, weight, bias)
        self.left[part] = (kept,)
        return out if activation is None else ACT2FN[activation](out)

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Replaces transformers' `torch_chunk_gated_delta_rule` in the mixer's forward."""
        epsilon = EPSILON if use_qk_l2norm_in_kernel else None
        out, added = delta_rule(query, key, value, g, beta, self.states[True, 0], self.rows, epsilon)
        self.left[True, 0] = added
        return out, None

    def selective_scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Replaces transformers' `mamba2_chunk_scan` in the mixer's forward."""
        steps = Steps(dt_bias, dt_limit) if dt_softplus and dt_bias is not None else None
        if steps is None:
            dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
            dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        rate = (-A).log()
        out, added = selective_scan(hidden_states, dt, rate, B, C, self.states[True, 0], self.rows, steps, D)
        self.left[True, 0] = added
        return out.contiguous(), None  # the callers use view()

    def channel_scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        z: Tensor,
        delta_bias: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Replaces transformers' `mamba_selective_scan` in the mixer's forward."""
        inputs, dt, gate, into, out_of = (part.transpose(1, 2) for part in (hidden_states, dt, z, B, C))
        own = ChannelParameters((-A).log(), delta_bias, D)
        out, added = channel_scan(inputs, dt, gate, into, out_of, own, self.states[True, 0], self.rows)
        self.left[True, 0] = added
        return out.transpose(1, 2), None


class _Recurrence(NamedTuple):
    """Name of a function of transformers, and the function that replaces it in passes over trees."""

    name: str
    over_trees: Callable
    num_dims: int
    """Number of dimensions of a sequence's state."""


_RECURRENCES = (
    _Recurrence("torch_chunk_gated_delta_rule", TreeView.delta_rule, 3),
    _Recurrence("mamba2_chunk_scan", TreeView.selective_scan, 3),
    _Recurrence("mamba_selective_scan", TreeView.channel_scan, 2),
)


class TreeMixer(Mixer):
    """A mixer that processes whole trees instead of paths; for the arguments see `Mixer`."""

    def __init__(self, module: nn.Module, state: LayerState, entries: list[nn.Linear], exit: nn.Linear | None) -> None:
        forward = module.forward
        super().__init__(module, state, entries, exit)
        self._trees: TreeView | None = None

        def of_view(function: Callable) -> Callable:
            return lambda *args, **kwargs: function(self._trees, *args, **kwargs)

        found = {one.name: of_view(one.over_trees) for one in _RECURRENCES} | {_CONVOLUTION: of_view(TreeView.convolve)}
        self._over = copied(module, forward, found)
        self._steps = steps_of(module, entries)
        if self._steps is not None and not self._is_alike():
            logger.info("the mixer of layer %d keeps transformers' code: a trial gives other numbers", state.layer)
            self._steps = None

    @staticmethod
    def fits(module: nn.Module, state: LayerState) -> bool:
        """Whether each part of the state is read by a function that has a replacement for trees."""
        names = inspect.unwrap(type(module).forward).__code__.co_names
        dims = {one.num_dims for one in _RECURRENCES if one.name in names}
        return all(len(part.shape) in dims if part.recurrent else _CONVOLUTION in names for part in state.parts)

    def _over_trees(self, padded: list[Tensor], decodes: DecodeStates, states: RoundStates) -> list[Tensor]:
        """See `Mixer`."""
        parts, inputs = states.pool.parts(self.state.layer), padded[0]
        if self._steps is not None:
            self._parts = {CONVOLUTION: 1, RECURRENCE: 3}
            kept = states.kept.taken(self, self._like(inputs), inputs.shape[1])
            return [self._steps(padded, parts, decodes.trees, kept)]
        mixed, left = self._by_transformers(padded, TreeView(parts, decodes.trees))
        states.kept.put(self, [part for own in left.values() for part in own])
        self._parts = {key: len(own) for key, own in left.items()}
        return mixed

    def _by_transformers(
        self, padded: list[Tensor], view: TreeView
    ) -> tuple[list[Tensor], dict[tuple[bool, int], tuple[Tensor, ...]]]:
        """Runs transformers' forward over trees; returns its outputs and the nodes' contributions to the states."""
        self._trees = view
        inputs, *self._given = padded
        try:
            mixed = self._over(inputs, **{self._cache_name: view})
        finally:
            self._given = self._trees = None
        return list(mixed) if isinstance(mixed, tuple) else [mixed], view.left

    def _like(self, inputs: Tensor) -> list[Tensor]:
        """Returns one row of each tensor that the steps keep, for inputs [num_reqs, num_nodes, n]."""
        convolved, *added = self._steps.kept()
        num_rows = inputs.shape[0] * inputs.shape[1]
        rows = [(convolved, inputs.dtype), *((shape, torch.float32) for shape in added)]
        return [inputs.new_empty(1, dtype=dtype).expand(num_rows, *shape) for shape, dtype in rows]

    @torch.inference_mode()
    def _is_alike(self) -> bool:
        """Whether the steps give transformers' numbers over a small tree."""
        like, draw = self.module.conv1d.weight, torch.Generator().manual_seed(0)
        if like.is_meta or like.dtype not in TOLERANCE:
            return False

        def numbers(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
            return torch.randn(shape, generator=draw).to(like.device, dtype)

        parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]], device=like.device)
        window = max(part.shape[-1] for part in self.state.parts if not part.recurrent)
        rows = TreeRows.of(parents[:, 1] + 1, parents, 3, window)
        states = {(part.recurrent, part.index): numbers(2, *part.shape, dtype=part.dtype) for part in self.state.parts}
        first = getattr(self.module, "in_proj", None) or self.module.get_submodule(self._steps.entries[0])
        inputs = numbers(*parents.shape, first.in_features)
        padded = [inputs, *(entry(inputs) for entry in self._entries)]
        mixed, left = self._by_transformers(padded, TreeView(states, rows))
        like_kept = [part.flatten(0, 1) for own in left.values() for part in own]
        kept = [part.new_empty(part.shape) for own in left.values() for part in own]
        ours = [self._steps(padded, states, rows, kept), *kept]
        theirs = [mixed[0], *(part.unflatten(0, parents.shape) for part in like_kept)]
        within = TOLERANCE[like.dtype]
        return all(
            own.shape == other.shape and bool((own - other).float().norm() <= within * other.float().norm())
            for own, other in zip(ours, theirs, strict=True)
        )

    def advance(self, pool: StatePool, kept: KeptRows, accepted: AcceptedStates, path: Path) -> None:
        """See `Mixer`; adds the contributions of a path's nodes to the states."""
        left = iter(kept.latest_states(self, len(accepted.slots), accepted.num_nodes))
        for (recurrent, index), count in self._parts.items():
            states, own = pool.parts(self.state.layer)[recurrent, index], [next(left) for _ in range(count)]
            if recurrent and states.dim() == 3:
                advance_channels(Added(*own), self.module.A_log, states, path)
            elif recurrent:
                advance_recurrence(Added(*own), states, path)
            else:
                advance_convolution(own[0], states, path)
