"""Mixers whose recurrences run over whole trees: all nodes at once, starting from one unchanged state.

The mixer's forward is transformers' own. Its convolution and recurrence functions are replaced by functions of
`wingbeat.kernels.state`, in which a node follows its ancestors in the tree instead of the tokens before it.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from wingbeat.kernels.state.reference import (
    advance_convolution,
    advance_recurrence,
    convolve,
    delta_rule,
    selective_scan,
)
from wingbeat.kernels.state.rows import Added, Path, TreeRows
from wingbeat.runtime.state.mixer import Mixer, copied
from wingbeat.runtime.state.pool import LayerState, StatePool
from wingbeat.runtime.state.round_states import AcceptedStates, DecodeStates, KeptRows, RoundStates

_CONVOLUTION = "causal_conv1d_fn"
_EPSILON = 1e-6
"""Value added to the sum of squares when queries and keys are L2-normalised."""


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
        self.left[part] = (inputs.transpose(1, 2),)
        out = convolve(inputs, self.states[part], self.rows, weight, bias)
        return (out if activation is None else ACT2FN[activation](out)).to(inputs.dtype)

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
        epsilon = _EPSILON if use_qk_l2norm_in_kernel else None
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
        steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
        out, added = selective_scan(hidden_states, steps, A, B, C, self.states[True, 0], self.rows)
        self.left[True, 0] = added
        # The output is made contiguous because the callers use view().
        return (out if D is None else out + D[:, None] * hidden_states.float()).contiguous(), None


class _Recurrence(NamedTuple):
    """Name of a function of transformers, and the function that replaces it in passes over trees."""

    name: str
    over_trees: Callable


_RECURRENCES = (
    _Recurrence("torch_chunk_gated_delta_rule", TreeView.delta_rule),
    _Recurrence("mamba2_chunk_scan", TreeView.selective_scan),
)


class TreeMixer(Mixer):
    """A mixer that processes whole trees instead of paths; for the arguments see `Mixer`."""

    def __init__(self, module: nn.Module, state: LayerState, entries: list[nn.Linear], exit: nn.Linear | None) -> None:
        forward = module.forward
        super().__init__(module, state, entries, exit)
        self._trees: TreeView | None = None

        def of_view(function: Callable) -> Callable:
            return lambda *args, **kwargs: function(self._trees, *args, **kwargs)

        found = {
            one.name: of_view(one.over_trees) for one in (_Recurrence(_CONVOLUTION, TreeView.convolve), *_RECURRENCES)
        }
        self._over = copied(module, forward, found)

    @staticmethod
    def fits(module: nn.Module, state: LayerState) -> bool:
        """Whether each part of the state is read by a function that has a replacement for trees."""
        names = inspect.unwrap(type(module).forward).__code__.co_names
        recurs = any(one.name in names for one in _RECURRENCES)
        return all(recurs if part.recurrent else _CONVOLUTION in names for part in state.parts)

    def _over_trees(self, padded: list[Tensor], decodes: DecodeStates, states: RoundStates) -> list[Tensor]:
        """See `Mixer`."""
        self._trees = view = TreeView(states.pool.parts(self.state.layer), decodes.trees)
        inputs, *self._given = padded
        try:
            mixed = self._over(inputs, **{self._cache_name: view})
        finally:
            self._given = self._trees = None
        states.kept.put(self, [part for left in view.left.values() for part in left])
        self._parts = {key: len(left) for key, left in view.left.items()}
        return list(mixed) if isinstance(mixed, tuple) else [mixed]

    def advance(self, pool: StatePool, kept: KeptRows, accepted: AcceptedStates, path: Path) -> None:
        """See `Mixer`; adds the contributions of a path's nodes to the states."""
        left = iter(kept.latest_states(self, len(accepted.slots), accepted.num_nodes))
        for (recurrent, index), count in self._parts.items():
            states, own = pool.parts(self.state.layer)[recurrent, index], [next(left) for _ in range(count)]
            if recurrent:
                advance_recurrence(Added(*own), states, path)
            else:
                advance_convolution(own[0], states, path)
