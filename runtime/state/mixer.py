"""Runs a mixer of transformers over the rows of a round: splits the rows by sequence and calls transformers' code.

The mixer's forward is transformers' code. Its outer linear layers multiply all rows of the round at once; only the
inner part, which mixes the tokens of a sequence, runs per sequence.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from wingbeat.kernels.state.reference import scan_tokens
from wingbeat.kernels.state.rows import ChannelParameters, Path
from wingbeat.runtime.state.pool import LayerState, StatePool, StateView
from wingbeat.runtime.state.round_states import AcceptedStates, DecodeStates, KeptRows, RoundStates

_SCAN = "mamba_selective_scan"
_DELTA_RULE = "torch_chunk_gated_delta_rule"
CACHE_ARGUMENTS = ("cache_params", "past_key_values")
"""Parameter names of the cache in the forwards of mixers."""


class Mixer:
    """Replaces a mixer module's forward during rounds, when `states` is set; at other times transformers' forward runs.

    Args:
        state: shapes of the mixer's state.
        entries: linear layers that multiply the mixer's unmodified input.
        exit: linear layer whose result the mixer returns; None if there is none.
    """

    def __init__(self, module: nn.Module, state: LayerState, entries: list[nn.Linear], exit: nn.Linear | None) -> None:
        self.module, self.state = module, state
        self.states: RoundStates | None = None
        """States of the running pass, stored here because some decoder layers do not pass keyword arguments on.
        """
        self._given: list[Tensor] | None = None
        self._view: StateView | None = None
        edges = {*entries, exit}
        self.inner_linears = {m for m in module.modules() if isinstance(m, nn.Linear) and m not in edges}
        """Linear layers of the inner part, which process only some rows of a batch in a call."""
        self._entries = [self._stand_in(linear, index) for index, linear in enumerate(entries)]
        self._exit = None if exit is None else self._stand_in(exit, None)
        arguments = inspect.signature(type(module).forward).parameters
        self._cache_name = next(name for name in CACHE_ARGUMENTS if name in arguments)
        # The scan starts from the stored state; transformers' Mamba-1 scan starts from zero.
        self._forward = copied(module, module.forward, {_SCAN: self._scan})
        self._names = inspect.unwrap(type(module).forward).__code__.co_names
        self._chunk_size = getattr(module, "chunk_size", None)
        module.forward = self._call

    def _call(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        if self.states is None:
            return self._forward(hidden_states, *args, **kwargs)
        return self._mix(hidden_states, self.states)

    def _mix(self, hidden_states: Tensor, states: RoundStates) -> Tensor | tuple[Tensor, ...]:
        """Runs the mixer over a round's rows [1, num_tokens, hidden_size]; advances the states of prompt chunks."""
        layer, pool, decodes = self.state.layer, states.pool, states.decodes
        rows = [hidden_states[0], *(entry(hidden_states)[0] for entry in self._entries)]
        parts: list[list[Tensor]] = []
        if decodes is not None:
            mixed = self._over_trees([decodes.padded(part) for part in rows], decodes, states)
            parts.append([decodes.decodes.packed(part) for part in mixed])
        for piece in states.pieces:
            view = pool.gather(layer, piece.live)
            span = slice(piece.start, piece.start + piece.length)
            parts.append([part[0] for part in self._run([part[None, span] for part in rows], view)])
            pool.store(layer, piece.live, view)
            if piece.save is not None:
                pool.store(layer, piece.save, view)
        results = [torch.cat(same) for same in zip(*parts, strict=True)] if len(parts) > 1 else parts[0]
        if self._exit is not None:
            return self._exit(results[0])[None]
        return results[0][None] if len(results) == 1 else tuple(part[None] for part in results)

    def _over_trees(self, padded: list[Tensor], decodes: DecodeStates, states: RoundStates) -> list[Tensor]:
        """Runs the mixer over trees [num_reqs, num_nodes, ...]; the path to each node is run as a separate sequence."""
        states.kept.put(self, padded)
        view = states.pool.gather(self.state.layer, decodes.slots)
        return [decodes.nodes_of(part) for part in self._run([decodes.paths_of(part) for part in padded], view)]

    def advance(self, pool: StatePool, kept: KeptRows, accepted: AcceptedStates, path: Path) -> None:
        """Advances states along accepted paths, token by token; all shapes depend only on the arguments' shapes.

        Args:
            path: the path of `accepted`.
        """
        layer, (num_reqs, longest) = self.state.layer, accepted.nodes.shape
        rows = [accepted.rows_of(part) for part in kept.latest_states(self, num_reqs, accepted.num_nodes)]
        for step in range(longest):
            view = pool.gather(layer, accepted.slots)
            self._run([part[:, step : step + 1] for part in rows], view)
            pool.store(layer, accepted.slots, view, accepted.num_tokens > step)
            for num_tokens, targets in accepted.saves:
                pool.store(layer, targets, view, num_tokens == step + 1)

    def _run(self, parts: list[Tensor], view: StateView) -> tuple[Tensor, ...]:
        """Runs the part of the mixer between the mixer's outer linear layers; returns its outputs, usually one tensor.

        Args:
            parts: [num_seqs, length, ...]: the mixer's input, and the output of each layer of `entries`.
            view: the states, which this method advances past the tokens.
        """
        inputs, *self._given = parts
        self._view = view
        try:
            mixed = self._forward(inputs, **{self._cache_name: view}, **self._sizes(inputs))
            return mixed if isinstance(mixed, tuple) else (mixed,)
        finally:
            self._given = self._view = None
            if self._chunk_size is not None:
                self.module.chunk_size = self._chunk_size

    def _sizes(self, inputs: Tensor) -> dict[str, int]:
        """On CPUs, limits the chunk size to the number of tokens, because torch's code would pad to whole chunks."""
        if inputs.device.type != "cpu":
            return {}
        if isinstance(self._chunk_size, int):
            self.module.chunk_size = min(self._chunk_size, inputs.shape[1])
        return {"chunk_size": min(64, inputs.shape[1])} if _DELTA_RULE in self._names else {}

    def _stand_in(self, linear: nn.Linear, index: int | None) -> Callable[[Tensor], Tensor]:
        """Replaces a linear layer's forward, so that the layer returns its precomputed output while the mixer runs.

        Returns the layer's original forward.
        """
        own = linear.__dict__.get("forward")

        def original(inputs: Tensor) -> Tensor:
            # The class is looked up at each call, because adapters replace the class later.
            return type(linear).forward(linear, inputs) if own is None else own(inputs)

        def forward(inputs: Tensor) -> Tensor:
            if self._given is None:
                return original(inputs)
            return inputs if index is None else self._given[index]

        linear.forward = forward
        return original

    def _scan(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, **kwargs: Any
    ) -> Any:
        """Runs Mamba-1 over tokens from the stored state; tensors are [num_seqs, channels, length]."""
        if self._view is None:
            scan = inspect.unwrap(type(self.module).forward).__globals__[_SCAN]
            return scan(hidden_states, dt, A, B, C, D=D, z=z, **kwargs)
        state, own = self._view.get_recurrent_state(self.state.layer), (self.module.A_log, kwargs["delta_bias"], D)
        parts = [part.transpose(1, 2) for part in (hidden_states, dt, z, B, C)]
        return scan_tokens(*parts, ChannelParameters(*own), state).transpose(1, 2), state


def copied(module: nn.Module, forward: Callable[..., Tensor], names: dict[str, Callable]) -> Callable[..., Tensor]:
    """Returns transformers' forward with some global functions replaced.

    If the forward uses none of these functions, returns the forward unchanged.
    """
    plain = inspect.unwrap(type(module).forward)
    if not names.keys() & set(plain.__code__.co_names):
        return forward
    copy = FunctionType(
        plain.__code__, {**plain.__globals__, **names}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy.__get__(module)


def states_of(mixers: tuple[Mixer, ...]) -> list[LayerState]:
    """Returns the state shapes by layer; if a layer has several mixers, they share its state."""
    return list({mixer.state.layer: mixer.state for mixer in mixers}.values())
