"""A mixer of transformers over the rows of a round: taken apart by sequence around its own code, and put back together.

The mixer's forward is transformers' own. What it multiplies its input and its result by is done for all rows at once,
and only what lies between, where a sequence's tokens meet, sees one sequence after the other.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from wingbeat.kernels.state.rows import Path
from wingbeat.runtime.state.pool import LayerState, StatePool, StateView
from wingbeat.runtime.state.round_states import AcceptedStates, DecodeStates, KeptRows, RoundStates

_SCAN, _STEP = "mamba_selective_scan", "mamba_selective_state_update"
_DELTA_RULE = "torch_chunk_gated_delta_rule"
CACHE_ARGUMENTS = ("cache_params", "past_key_values")
"""Names under which mixers' forwards take their cache."""


class Mixer:
    """Stands in for the forward of one mixer module while `states` tells it of a round; else it runs as it is.

    Args:
        state: what it remembers.
        entries: linear layers that multiply its very input.
        exit: the one whose result it returns.
    """

    def __init__(self, module: nn.Module, state: LayerState, entries: list[nn.Linear], exit: nn.Linear | None) -> None:
        self.module, self.state = module, state
        self.states: RoundStates | None = None
        """Of the pass that runs; decoder layers do not all pass on what they are told beside their input."""
        self._given: list[Tensor] | None = None
        self._view: StateView | None = None
        edges = {*entries, exit}
        self.inner_linears = {m for m in module.modules() if isinstance(m, nn.Linear) and m not in edges}
        """Linear layers that see the tokens of one sequence after the other."""
        self._entries = [self._stand_in(linear, index) for index, linear in enumerate(entries)]
        self._exit = None if exit is None else self._stand_in(exit, None)
        arguments = inspect.signature(type(module).forward).parameters
        self._cache_name = next(name for name in CACHE_ARGUMENTS if name in arguments)
        self._forward = self._with_initial_state(module.forward)
        self._names = inspect.unwrap(type(module).forward).__code__.co_names
        self._chunk_size = getattr(module, "chunk_size", None)
        module.forward = self._call

    def _call(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        if self.states is None:
            return self._forward(hidden_states, *args, **kwargs)
        return self._mix(hidden_states, self.states)

    def _mix(self, hidden_states: Tensor, states: RoundStates) -> Tensor | tuple[Tensor, ...]:
        """A round's rows [1, num_tokens, hidden_size]; the states of prompt chunks go on by them."""
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
        """Results of the mixer for trees [num_reqs, num_nodes, ...]: the path to each node runs by itself."""
        states.kept.put(self, padded)
        view = states.pool.gather(self.state.layer, decodes.slots)
        return [decodes.nodes_of(part) for part in self._run([decodes.paths_of(part) for part in padded], view)]

    def advance(self, pool: StatePool, kept: KeptRows, accepted: AcceptedStates, path: Path) -> None:
        """Let states go on along accepted paths, token by token, at shapes that the arguments decide.

        Args:
            path: of `accepted`.
        """
        layer, (num_reqs, longest) = self.state.layer, accepted.nodes.shape
        rows = [accepted.rows_of(part) for part in kept.take(self, num_reqs, accepted.num_nodes)]
        for step in range(longest):
            view = pool.gather(layer, accepted.slots)
            self._run([part[:, step : step + 1] for part in rows], view)
            pool.store(layer, accepted.slots, view, accepted.num_tokens > step)
            for num_tokens, targets in accepted.saves:
                pool.store(layer, targets, view, num_tokens == step + 1)

    def _run(self, parts: list[Tensor], view: StateView) -> tuple[Tensor, ...]:
        """The mixer between its outer products: what it returns, one tensor for most.

        Args:
            parts: [num_seqs, length, ...]: its input, and that by each entry.
            view: goes on by the tokens.
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
        """Chunks no longer than the tokens: torch's own code pads to whole ones."""
        if inputs.device.type != "cpu":
            return {}
        if isinstance(self._chunk_size, int):
            self.module.chunk_size = min(self._chunk_size, inputs.shape[1])
        return {"chunk_size": min(64, inputs.shape[1])} if _DELTA_RULE in self._names else {}

    def _stand_in(self, linear: nn.Linear, index: int | None) -> Callable[[Tensor], Tensor]:
        """Let a linear layer say what it is given while the mixer runs; returns what it does otherwise."""
        own = linear.__dict__.get("forward")

        def original(inputs: Tensor) -> Tensor:
            # Of its class as it is then: adapters give it another one.
            return type(linear).forward(linear, inputs) if own is None else own(inputs)

        def forward(inputs: Tensor) -> Tensor:
            if self._given is None:
                return original(inputs)
            return inputs if index is None else self._given[index]

        linear.forward = forward
        return original

    def _with_initial_state(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A forward whose scan goes on from the state before it: transformers' for Mamba-1 begins at zero."""
        return copied(self.module, forward, {_SCAN: self._scan})

    def _scan(self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **kwargs: Any) -> Any:
        """Mamba-1 token by token, as transformers decodes; [num_seqs, channels, length] as its scan has them."""
        names = inspect.unwrap(type(self.module).forward).__globals__
        if self._view is None:
            return names[_SCAN](hidden_states, dt, A, B, C, **kwargs)
        state, gate = self._view.get_recurrent_state(self.state.layer), kwargs.get("z")
        outputs = [
            names[_STEP](
                state,
                hidden_states[..., token],
                dt[..., token],
                A,
                B[..., token],
                C[..., token],
                kwargs["D"],
                z=None if gate is None else gate[..., token],
                dt_bias=kwargs["delta_bias"],
                dt_softplus=kwargs["delta_softplus"],
            )
            for token in range(hidden_states.shape[-1])
        ]
        return torch.stack(outputs, dim=-1), state


def copied(module: nn.Module, forward: Callable[..., Tensor], names: dict[str, Callable]) -> Callable[..., Tensor]:
    """A forward, transformers' own code, that finds other functions under these names; itself where it has none."""
    plain = inspect.unwrap(type(module).forward)
    if not names.keys() & set(plain.__code__.co_names):
        return forward
    copy = FunctionType(
        plain.__code__, {**plain.__globals__, **names}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy.__get__(module)


def states_of(mixers: tuple[Mixer, ...]) -> list[LayerState]:
    """What mixers remember of a sequence, by layer; a layer may have several mixers."""
    return list({mixer.state.layer: mixer.state for mixer in mixers}.values())
