"""LoRA adapters on the linear layers of a loaded model; each row of a batch can have another adapter.

The base model's weights stay unchanged. If a fused layer computes several linear layers with the same input as one
matrix product, their adapters are stacked and applied together. A linear layer that runs by itself reads only its part
of the stack.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from wingbeat.kernels.lora.adapters import add_adapters
from wingbeat.kernels.lora.stacked_adapters import AdapterRows, StackedAdapters
from wingbeat.runtime.lora.adapter import AdapterError, LinearAdapter, LinearShape
from wingbeat.runtime.lora.places import AdapterPlaces
from wingbeat.runtime.parts import first_result, hooks
from wingbeat.runtime.round.rows import Rows
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME

JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Groups of linear layers that a swapped layer computes as one matrix product, in the order of the parts of
`StackedAdapters`.
"""
_NUM_ROWS = 7


class _Place(NamedTuple):
    """Where the adapters of a linear layer are stored."""

    stack: StackedAdapters
    part: int


class ModelAdapters(AdapterPlaces):
    """Adapters of a model. Memory for `max_loras` adapters is allocated on the model's device.

    Args:
        model: the model, already prepared for serving; the classes of its linear layers are changed.
        layers: the decoder layers; only these may have adapters.
        max_loras: number of adapters held at once.
        max_rank: maximum rank of an adapter.
        inner: linear layers that process the rows of one sequence at a time; they cannot have adapters.

    Raises:
        AdapterError: the model has no linear layer that adapters could act on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: nn.ModuleList,
        max_loras: int,
        max_rank: int,
        inner: frozenset[nn.Module] = frozenset(),
    ) -> None:
        super().__init__(max_loras, max_rank)
        self._places: dict[str, _Place] = {}
        names = {id(module): name for name, module in model.named_modules()}
        whole = linears_of_all_rows(model, layers) - inner
        for layer in layers:
            self._adapt_layer(layer, names[id(layer)], whole)
        if not self._places:
            raise AdapterError(f"{type(model).__name__} has no linear layers that adapters could act on")
        self.linears = {
            path: LinearShape(place.stack.a.shape[1], place.stack.parts[place.part])
            for path, place in self._places.items()
        }

    def rows_of(self, ids: Tensor, on_host: bool) -> AdapterRows:
        """Returns the adapter of each row of a pass; for the arguments see `AdapterRows.of`."""
        return AdapterRows.of(ids, self.max_loras, on_host)

    def put(self, adapter_id: int, path: str, adapter: LinearAdapter) -> None:
        """See `AdapterPlaces.put`."""
        place = self._places[path]
        place.stack.put(adapter_id, place.part, *adapter)

    def clear(self, adapter_id: int) -> None:
        """See `AdapterPlaces.clear`."""
        for place in self._places.values():
            place.stack.clear(adapter_id)

    def _adapt_layer(self, layer: nn.Module, name: str, whole: set[nn.Module]) -> None:
        joined = _joined(layer)
        linears: dict[str, Any] = {path: module for path, module in layer.named_modules() if module in whole}
        groups = list(joined)
        groups += [(path,) for path in linears if not any(path in group for group in groups)]
        stacks = [self._stack([linears[path] for path in group]) for group in groups]
        for group, stack in zip(groups, stacks, strict=True):
            for part, path in enumerate(group):
                self._places[f"{name}.{path}"] = _Place(stack, part)
                linear = linears[path]
                add = first_result("adapt_product", linear) or add_adapters
                linear.__dict__["_adapters"] = _Adapters(self, stack.part(part), add)
                linear.__class__ = adapted_class(type(linear))
        if joined:
            _add_to(layer, tuple(stacks[: len(joined)]))

    def _stack(self, linears: list[nn.Linear]) -> StackedAdapters:
        parts, weight = tuple(linear.out_features for linear in linears), linears[0].weight
        inputs = linears[0].in_features
        return StackedAdapters.empty(self.max_loras, self.max_rank, inputs, parts, weight.dtype, weight.device)


def _attention_of(layer: nn.Module) -> tuple[str, nn.Module | None]:
    """Returns the name and module of a layer's attention, or of the mixer in its place."""
    name = "self_attn" if getattr(layer, "self_attn", None) is not None else "mixer"
    return name, getattr(layer, name, None)


def _joined(layer: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Returns the paths of the linear layers that a layer, or its attention, computes as one matrix product."""
    name, attention = _attention_of(layer)
    paths = getattr(attention, "joined_paths", ())
    within = tuple(tuple(f"{name}.{path}" for path in group) for group in paths)
    return within or JOINED[: getattr(layer, "num_joined", 0)]


def _add_to(layer: Any, stacks: tuple[StackedAdapters, ...]) -> None:
    """Makes a swapped layer, or a layer with swapped attention, add the adapters to its matrix products."""
    for module in (layer, _attention_of(layer)[1]):
        if (add_by := getattr(module, "add_by", None)) is not None:
            add_by(partial(_add, stacks))
    for adapt_layer in hooks("adapt_layer"):
        adapt_layer(layer, stacks)


def _add(stacks: tuple[StackedAdapters, ...], out: Tensor, x: Tensor, product: int, rows: Rows) -> Tensor:
    adapted = rows.columns.get(AdapterRows)
    return out if adapted is None else add_adapters(out, x, stacks[product], adapted)


@torch.inference_mode()
def linears_of_all_rows(model: PreTrainedModel, layers: nn.ModuleList) -> set[nn.Module]:
    """Returns the linear layers that process each row of a batch exactly once, in the order of the rows. Linear layers
    of experts are not among them.
    """
    calls: dict[nn.Module, list[torch.Size]] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls.setdefault(module, []).append(args[0].shape)

    linears = {module for module in layers.modules() if isinstance(module, nn.Linear)}
    hooks = [linear.register_forward_pre_hook(note) for linear in linears]
    model.set_attn_implementation("eager")
    try:
        token_ids = torch.arange(_NUM_ROWS, device=next(model.parameters()).device)
        model(input_ids=token_ids[None], use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        for hook in hooks:
            hook.remove()
    shapes = (1, _NUM_ROWS), (_NUM_ROWS,)
    return {linear for linear, seen in calls.items() if len(seen) == 1 and seen[0][:-1] in shapes}


class _Adapters(NamedTuple):
    """Adapters of one linear layer."""

    of: ModelAdapters
    stack: StackedAdapters
    add: Callable[..., Tensor]
    """`add_adapters`, or a runtime part's function that replaces it."""


class AdaptedLinear(nn.Module):
    """Base class that an adapted linear layer has in front of its own class. The forward method adds the output of each
    row's adapter.
    """

    _adapters: _Adapters | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Maps inputs [..., in] to outputs [..., out]."""
        out = super().forward(input)
        if self._adapters is None:
            return out
        of, stack, add = self._adapters
        if (rows := of.rows) is None:
            return out
        x = input.reshape(-1, input.shape[-1])
        added = out.view(-1, out.shape[-1])
        add(added, x, stack, rows)
        return out

    def __getstate__(self) -> dict[str, Any]:
        # The adapters are left out, because they belong to the `ModelAdapters` of the original model. A copy computes
        # the base layer alone.
        return {name: value for name, value in super().__getstate__().items() if name != "_adapters"}


@cache
def adapted_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the subclass of a linear layer's class that applies adapters."""
    return type(kind.__name__, (AdaptedLinear, kind), {})
