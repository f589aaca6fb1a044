"""LoRA adapters as inputs of the verifier's graph.

The matrices of all adapters of a layer are concatenated, and each sequence selects the columns of its adapter.

A layer adds (x A * chosen) B, with A [inputs, max_loras * rank] and B [max_loras * rank, outputs], where `chosen` is 1
in the columns of the sequence's adapter and 0 elsewhere. Therefore no weights are gathered, and shapes do not depend on
the adapters in use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wingbeat.kernels.lora.stacked_adapters import AdapterRows
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.lora.adapted import linears_of_all_rows
from wingbeat.runtime.lora.adapter import LinearAdapter, LinearShape
from wingbeat.runtime.lora.places import AdapterPlaces
from wingbeat.runtime.round.rows import Rows
from wingbeat.runtime.tensorrt.graph_shapes import BATCH
from wingbeat.runtime.tensorrt.limits import Limits
from wingbeat.runtime.tensorrt.more_inputs import MoreInputs
from wingbeat.runtime.tensorrt.session import TensorSpec
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

IDS = "lora_ids"
"""Name of the input that holds each sequence's adapter id, int64 [batch]; 0 means no adapter."""


@dataclass(frozen=True)
class GraphAdapters(MoreInputs):
    """The linear layers of a graph that accept adapters, and the maximum number and rank of the adapters."""

    linears: Mapping[str, LinearShape]
    """Shapes of the linear layers, by module path in the model."""
    max_loras: int
    max_rank: int

    @classmethod
    def of_model(cls, loaded: LoadedModel, limits: Limits) -> "GraphAdapters":
        """The linear layers of a verifier that accept adapters, which are the same layers as when the verifier runs in
        torch.

        Raises:
            ValueError: the model has no such layers.
        """
        found = linears_of_all_rows(loaded.model, loaded.decoder_layers)
        linears = {
            path: LinearShape(module.in_features, module.out_features)
            for path, module in loaded.model.named_modules()
            if module in found
        }
        if not linears:
            problem = f"{loaded.name} has no linear layers that adapters act on"
            raise ValueError(f"max_loras is {limits.max_loras}: {problem}")
        return cls(linears, limits.max_loras, limits.max_lora_rank)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the matrices A and B of each linear layer in turn, by input name."""
        width = self.max_loras * self.max_rank
        return {
            name: sizes
            for path, (inputs, outputs) in self.linears.items()
            for name, sizes in ((f"lora_a.{path}", (inputs, width)), (f"lora_b.{path}", (width, outputs)))
        }

    def specs(self, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """See `MoreInputs.specs`: `IDS`, then the matrices."""
        matrices = {name: TensorSpec(dtype, sizes) for name, sizes in self.shapes.items()}
        return {IDS: TensorSpec(torch.int64, (BATCH,))} | matrices

    def fields(self) -> dict[str, Any]:
        """See `MoreInputs.fields`."""
        return {"lora_linears": [{"path": path, **one._asdict()} for path, one in self.linears.items()]}

    def trace(self, model: nn.Module) -> "AdaptedPass":
        """See `MoreInputs.trace`."""
        return AdaptedPass(model, self)

    def bind(self, loaded: LoadedModel, limits: EngineConfig) -> Mapping[str, Tensor]:
        """See `MoreInputs.bind`."""
        adapters = EngineAdapters(self, limits.max_loras, limits.max_lora_rank, loaded.dtype, loaded.device)
        if limits.max_loras:
            loaded.add(adapters)
        return adapters.tensors

    def of_pass(self, batch: Rows, rows: slice, shape: tuple[int, int]) -> dict[str, Tensor]:
        """See `MoreInputs.of_pass`; returns `IDS`, the adapter id of each sequence."""
        adapted = batch.columns.get(AdapterRows)
        nobodys = batch.token_ids.new_zeros(shape[0])
        return {IDS: nobodys if adapted is None else adapted.ids[rows].view(shape)[:, 0].contiguous()}


class EngineAdapters(AdapterPlaces):
    """Adapter matrices that a graph reads, at fixed addresses.

    Args:
        room: number and rank of the adapters that the graph can hold.
        max_loras, max_rank: number and maximum rank of the served adapters, within those of `room`.
        dtype, device: dtype and device of the matrices.
    """

    def __init__(
        self, room: GraphAdapters, max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(max_loras, max_rank)
        self.room, self.linears = room, room.linears
        self.tensors = {name: torch.zeros(size, dtype=dtype, device=device) for name, size in room.shapes.items()}

    def rows_of(self, ids: Tensor, on_host: bool) -> AdapterRows:
        """Wraps the adapter ids of a pass's rows, int64 [num_rows]."""
        return AdapterRows(ids)

    def put(self, adapter_id: int, path: str, adapter: LinearAdapter) -> None:
        """See `AdapterPlaces.put`."""
        begin = (adapter_id - 1) * self.room.max_rank
        own, (a, b) = slice(begin, begin + len(adapter.a)), self._pair(path)
        a[:, own] = adapter.a.t().to(a)
        b[own] = adapter.b.t().to(b)

    def clear(self, adapter_id: int) -> None:
        """See `AdapterPlaces.clear`."""
        rank = self.room.max_rank
        own = slice((adapter_id - 1) * rank, adapter_id * rank)
        for path in self.linears:
            a, b = self._pair(path)
            a[:, own] = 0
            b[own] = 0

    def _pair(self, path: str) -> tuple[Tensor, Tensor]:
        return self.tensors[f"lora_a.{path}"], self.tensors[f"lora_b.{path}"]


class AdaptedPass(nn.Module):
    """Forward hooks that add the adapters' output to linear layers during tracing."""

    columns: Tensor

    def __init__(self, model: nn.Module, room: GraphAdapters) -> None:
        super().__init__()
        places = torch.arange(1, room.max_loras + 1).repeat_interleave(room.max_rank)
        self.register_buffer("columns", places, persistent=False)
        self._chosen: list[Tensor] = []
        self._weights: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._linears = [model.get_submodule(path) for path in room.linears]
        self._hooks = [linear.register_forward_hook(self._add) for linear in self._linears]

    def enter(self, inputs: list[Tensor]) -> None:
        """See `TracedInputs.enter`."""
        ids, *weights = inputs
        self._chosen[:] = [(ids[:, None] == self.columns)[:, None].to(weights[0].dtype)]
        self._weights.update(zip(self._linears, zip(weights[::2], weights[1::2], strict=True), strict=True))

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _add(self, linear: nn.Module, args: tuple, out: Tensor) -> Tensor:
        (a, b), [chosen], [x] = self._weights[linear], self._chosen, args
        rows = x if x.dim() == chosen.dim() else x.unflatten(0, (chosen.shape[0], -1))
        return out + (((rows @ a) * chosen) @ b).view_as(out)
