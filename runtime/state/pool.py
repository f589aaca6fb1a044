"""The states of a model's mixers, one row per sequence, and what a mixer sees of some rows.

A mixer is the part of a decoder layer that remembers a sequence in tensors of one size, however long it is: gated delta
nets, Mamba-1 and Mamba-2, short convolutions.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class StatePart(NamedTuple):
    """One tensor of a mixer's state."""

    recurrent: bool
    """Else the inputs that its convolution looks back on."""
    index: int
    """Among the mixer's states of this kind, as transformers numbers them."""
    shape: tuple[int, ...]
    """For one sequence."""
    dtype: torch.dtype


class LayerState(NamedTuple):
    """What one layer's mixer remembers of a sequence."""

    layer: int
    parts: tuple[StatePart, ...]

    @property
    def num_bytes(self) -> int:
        """For one sequence."""
        return sum(math.prod(part.shape) * part.dtype.itemsize for part in self.parts)


class StateView:
    """States of a few sequences as a mixer's cache: what it reads there, and what it leaves.

    Has the methods of `transformers.Cache` that mixers call; a state of zeros is that of no tokens.
    """

    def __init__(self, parts: dict[tuple[bool, int], Tensor]) -> None:
        self.parts = parts

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[num_seqs, channels, kernel_size], which the caller may write to."""
        return self.parts.get((False, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[num_seqs, ...], which the caller may write to."""
        return self.parts.get((True, state_idx))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Append inputs [num_seqs, channels, length]; returns them behind those before."""
        before = self.parts[False, state_idx]
        inputs = torch.cat([before, conv_states], dim=-1)
        self.parts[False, state_idx] = inputs[..., -before.shape[-1] :]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Take the state behind the tokens."""
        self.parts[True, state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether states before the latest are asked for: never."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there are states: always."""
        return True


class StatePool:
    """One row of every layer's state per sequence, at addresses that never change; all rows are zeros at first.

    Parts of one shape lie together: `stacks` has them as [num_layers, num_rows, ...].
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
        """The state of one layer: [num_rows, ...] by whether the part is recurrent, and by its index."""
        return self._layers[layer]

    def gather(self, layer: int, rows: Tensor) -> StateView:
        """Copies of rows int64 [num_seqs]."""
        return StateView({key: part.index_select(0, rows) for key, part in self._layers[layer].items()})

    def store(self, layer: int, rows: Tensor, view: StateView, live: Tensor | None = None) -> None:
        """Keep what a mixer left in rows int64 [num_seqs].

        Args:
            live: bool [num_seqs]: rows that are written; None writes all.
        """
        for key, part in self._layers[layer].items():
            new = view.parts[key].to(part.dtype)
            if live is not None:
                new = torch.where(live.view(-1, *[1] * (new.dim() - 1)), new, part.index_select(0, rows))
            part.index_copy_(0, rows, new)

    def copy_all(self, source: int, target: int) -> None:
        """All layers' states from one row to another."""
        for stack in self.stacks.values():
            stack[:, target].copy_(stack[:, source])

    def clear(self, row: int) -> None:
        """Let a row be the state of no tokens."""
        for stack in self.stacks.values():
            stack[:, row].zero_()

    def row(self, row: int) -> dict[str, Tensor]:
        """One row of every layer's state, by name; what is written to these is in the pool."""
        return {
            f"{layer}.{'recurrent' if recurrent else 'conv'}.{index}": part[row]
            for layer, parts in self._layers.items()
            for (recurrent, index), part in parts.items()
        }


def row_bytes(layers: Sequence[LayerState]) -> int:
    """Bytes of one sequence's states over all layers."""
    return sum(layer.num_bytes for layer in layers)
