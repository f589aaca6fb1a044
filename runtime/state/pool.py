"""Pool of the states of a model's mixers, with one row per sequence, and a mixer's view of some rows.

A mixer is the part of a decoder layer that keeps a state of fixed size for a sequence. The kinds of mixers are gated
delta nets, Mamba-1, Mamba-2, and short convolutions.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class StatePart(NamedTuple):
    """A tensor of a mixer's state."""

    recurrent: bool
    """True for a recurrent state, False for the past inputs of a convolution."""
    index: int
    """Index of the tensor among the mixer's states of this kind, in transformers' numbering."""
    shape: tuple[int, ...]
    """Shape of the tensor for one sequence."""
    dtype: torch.dtype


class LayerState(NamedTuple):
    """State of one layer's mixers for a sequence."""

    layer: int
    parts: tuple[StatePart, ...]

    @property
    def num_bytes(self) -> int:
        """Size of one sequence's state in bytes."""
        return sum(math.prod(part.shape) * part.dtype.itemsize for part in self.parts)


class StateView:
    """States of a few sequences in the form of a mixer's cache, which the mixer reads and updates.

    Implements the methods of `transformers.Cache` that mixers call. A state of zeros is the state before the first
    token.
    """

    def __init__(self, parts: dict[tuple[bool, int], Tensor]) -> None:
        self.parts = parts

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the past inputs [num_seqs, channels, kernel_size], which the caller may modify."""
        return self.parts.get((False, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the states [num_seqs, ...], which the caller may modify."""
        return self.parts.get((True, state_idx))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Appends inputs [num_seqs, channels, length]; returns the previous inputs followed by the new inputs."""
        before = self.parts[False, state_idx]
        inputs = torch.cat([before, conv_states], dim=-1)
        self.parts[False, state_idx] = inputs[..., -before.shape[-1] :]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Stores the state after the pass's tokens."""
        self.parts[True, state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether states before the latest are recorded; always False."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there are states; always True."""
        return True


class StatePool:
    """The states of all layers, with one row per sequence; addresses never change, and all rows are initially zero.

    Parts of equal shape are stored together: `stacks` maps a part to [num_layers, num_rows, ...].
    """

    def __init__(self, layers: Sequence[LayerState], num_rows: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.row_bytes = row_bytes(layers)
        alike: dict[StatePart, list[int]] = {}
        for state in layers:
            for part in state.parts:
                alike.setdefault(part, []).append(state.layer)
        self.stacks: dict[StatePart, Tensor] = {}
        self._layers: dict[int, dict[tuple[bool, int], Tensor]] = {state.layer: {} for state in layers}
        for part, owners in alike.items():
            stack = torch.zeros(len(owners), num_rows, *part.shape, dtype=part.dtype, device=device)
            self.stacks[part] = stack
            for layer, own in zip(owners, stack, strict=True):
                self._layers[layer][part.recurrent, part.index] = own

    def parts(self, layer: int) -> dict[tuple[bool, int], Tensor]:
        """Returns one layer's states: tensors [num_rows, ...] by pair (whether the state is recurrent, index)."""
        return self._layers[layer]

    def gather(self, layer: int, rows: Tensor) -> StateView:
        """Returns copies of the states in rows int64 [num_seqs]."""
        return StateView({key: part.index_select(0, rows) for key, part in self._layers[layer].items()})

    def store(self, layer: int, rows: Tensor, view: StateView, live: Tensor | None = None) -> None:
        """Stores a view's states into rows int64 [num_seqs].

        Args:
            live: bool [num_seqs]: rows that are written; None writes all rows.
        """
        for key, part in self._layers[layer].items():
            new = view.parts[key].to(part.dtype)
            if live is not None:
                new = torch.where(live.view(-1, *[1] * (new.dim() - 1)), new, part.index_select(0, rows))
            part.index_copy_(0, rows, new)

    def copy_all(self, source: int, target: int) -> None:
        """Copies all layers' states from one row to another."""
        for stack in self.stacks.values():
            stack[:, target].copy_(stack[:, source])

    def clear(self, row: int) -> None:
        """Sets a row to the state before the first token."""
        for stack in self.stacks.values():
            stack[:, row].zero_()

    def row(self, row: int) -> dict[str, Tensor]:
        """Returns one row of every layer's state, by name; the tensors are views of the pool."""
        return {
            f"{layer}.{'recurrent' if recurrent else 'conv'}.{index}": part[row]
            for layer, parts in self._layers.items()
            for (recurrent, index), part in parts.items()
        }


def row_bytes(layers: Sequence[LayerState]) -> int:
    """Bytes of one sequence's states over all layers."""
    return sum(layer.num_bytes for layer in layers)
