"""From checkpoints to ONNX: the verifier as eagle_base.onnx, the EAGLE head as eagle_draft.onnx.

One graph serves every stage: batch, rows and selected rows are free, capacity and widths are fixed.
"""

import ast
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim

from wingbeat.runtime.heads.contract import DraftHead
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.tensorrt.base_graph import BaseGraph, as_graph
from wingbeat.runtime.tensorrt.base_runner import mask_name
from wingbeat.runtime.tensorrt.draft_graph import DraftGraph
from wingbeat.runtime.tensorrt.engine_config import Limits
from wingbeat.runtime.tensorrt.graph_ops import GraphOps
from wingbeat.runtime.tensorrt.stage_runner import MASK, START, cache_names
from wingbeat.runtime.verifier.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

BATCH, ROWS, SELECTED = "batch", "rows", "selected"
"""Names of the free dimensions."""
_MODULE_PREFIXES = ("model.", "head.")
_SCOPES = "pkg.torch.onnx.name_scopes"
_FOLDED = "val_"
_NOISE = ("torch.onnx", "torch._dynamo", "torch.export", "onnxscript", "onnx_ir")


class ExportError(ValueError):
    """A graph cannot be exported, or the exported file is not valid; the message says which."""


class _Graph(NamedTuple):
    """A module and everything its export needs."""

    module: nn.Module
    args: tuple
    dynamic_shapes: tuple
    input_names: list[str]
    output_names: list[str]


def export_base(loaded: LoadedModel, tap_layers: tuple[int, ...], limits: Limits, ops: GraphOps, file: Path) -> None:
    """Write a verifier's graph, its weights in a file beside it, checked.

    Args:
        loaded: in the dtype of the engine, on the CPU.
        tap_layers: layers whose inputs the graph returns side by side; empty returns none.

    Raises:
        UnsupportedModelError: the model has what the graphs do not do.
        ExportError: torch or onnx refuse it.
    """
    with as_graph(loaded, ops):
        module = BaseGraph(loaded, tap_layers, ops)
        try:
            _export(_base_graph(module.eval(), loaded, bool(tap_layers), limits), ops.opset, file)
        finally:
            module.release()


def export_draft(head: DraftHead, limits: Limits, ops: GraphOps, file: Path) -> None:
    """Write a draft head's graph, its weights in a file beside it, checked.

    Raises:
        ExportError: torch or onnx refuse it.
    """
    _export(_draft_graph(DraftGraph(head, ops).eval(), head, limits), ops.opset, file)


def _base_graph(module: BaseGraph, loaded: LoadedModel, has_taps: bool, limits: Limits) -> _Graph:
    dims, sizes = _dims(limits), _example_sizes(limits)
    names = cache_names(len(loaded.layers))
    masks = [mask_name(window) for window in loaded.windows]
    caches, cache_dims = _caches(loaded.layers, limits, loaded.dtype, dims)
    args = (
        sizes.ids(),
        sizes.ids(),
        torch.zeros(sizes.batch, dtype=torch.int64),
        torch.zeros(sizes.batch, sizes.selected, dtype=torch.int64),
        [sizes.mask(limits.capacity) for _ in masks],
        caches,
    )
    by_row, by_selected = {0: dims[BATCH], 1: dims[ROWS]}, {0: dims[BATCH], 1: dims[SELECTED]}
    shapes = (
        by_row,
        by_row,
        {0: dims[BATCH]},
        by_selected,
        [{0: dims[BATCH], 2: dims[ROWS]} for _ in masks],
        cache_dims,
    )
    inputs = ["input_ids", "attention_pos_id", START, "last_token_ids", *masks, *names]
    outputs = ["logits", *(["hidden_states"] if has_taps else []), *(f"present_{name}" for name in names)]
    return _Graph(module, args, shapes, inputs, outputs)


def _draft_graph(module: DraftGraph, head: DraftHead, limits: Limits) -> _Graph:
    dims, sizes = _dims(limits), _example_sizes(limits)
    heads, dim = head.num_key_value_heads, head.head_dim
    caches, cache_dims = _caches([LayerAttention(heads, heads, dim, dim, None)], limits, head.dtype, dims)
    args = (
        sizes.ids(),
        torch.zeros(sizes.batch, sizes.rows, head.taps_size, dtype=head.dtype),
        torch.zeros(sizes.batch, sizes.rows, head.hidden_size, dtype=head.dtype),
        sizes.ids(),
        torch.zeros(sizes.batch, dtype=torch.int64),
        torch.zeros(sizes.batch, sizes.selected, dtype=torch.int64),
        sizes.mask(limits.capacity),
        *caches,
    )
    by_row, by_selected = {0: dims[BATCH], 1: dims[ROWS]}, {0: dims[BATCH], 1: dims[SELECTED]}
    shapes = (*[by_row] * 4, {0: dims[BATCH]}, by_selected, {0: dims[BATCH], 2: dims[ROWS]}, *cache_dims)
    names = cache_names(1)
    inputs = ["input_ids", "hidden_states_input", "hidden_states_from_draft", "attention_pos_id", START]
    inputs += ["last_token_ids", MASK, *names]
    return _Graph(module, args, shapes, inputs, ["logits", "hidden_states", *(f"present_{name}" for name in names)])


class _ExampleSizes(NamedTuple):
    """Of the tensors that a graph is traced with; sizes of 1 would be taken for constants."""

    batch: int
    rows: int
    selected: int

    def ids(self) -> Tensor:
        return torch.zeros(self.batch, self.rows, dtype=torch.int64)

    def mask(self, capacity: int) -> Tensor:
        return torch.ones(self.batch, 1, self.rows, capacity, dtype=torch.bool)


def _example_sizes(limits: Limits) -> _ExampleSizes:
    return _ExampleSizes(batch=2, rows=min(5, limits.max_input_len), selected=3)


def _dims(limits: Limits) -> dict[str, Dim]:
    most = max(limits.max_input_len, limits.max_verify_tree_size, limits.max_draft_tree_size, 8)
    return {
        BATCH: Dim(BATCH, min=1, max=max(limits.max_batch_size, 2)),
        ROWS: Dim(ROWS, min=1, max=most),
        SELECTED: Dim(SELECTED, min=1, max=most),
    }


def _caches(
    layers: Sequence[LayerAttention], limits: Limits, dtype: torch.dtype, dims: dict[str, Dim]
) -> tuple[list[Tensor], list[dict[int, Dim]]]:
    widths = [(layer.num_kv_heads, width) for layer in layers for width in (layer.key_dim, layer.value_dim)]
    caches = [torch.zeros(2, heads, limits.capacity, width, dtype=dtype) for heads, width in widths]
    return caches, [{0: dims[BATCH]} for _ in caches]


def _export(graph: _Graph, opset: int, file: Path) -> None:
    import onnx

    for name in _NOISE:
        logging.getLogger(name).setLevel(logging.ERROR)
    options: dict[str, Any] = {"opset_version": opset, "dynamo": True, "verbose": False}
    options |= {"input_names": graph.input_names, "output_names": graph.output_names}
    try:
        # With gradients on, nothing takes the CPU's own kernels, which no graph can hold.
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(graph.module, graph.args, dynamic_shapes=graph.dynamic_shapes, **options)
            _name_weights(program.model.graph)
            program.save(file, external_data=True)
    except Exception as error:  # torch wraps whatever its tracing leads to
        raise ExportError(f"{file.name}: torch.onnx cannot export it: {_cause(error)}") from error
    try:
        onnx.checker.check_model(file, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"{file.name}: onnx.checker refuses it: {_cause(error)}") from error


def _name_weights(graph: Any) -> None:
    """Weights get the names they have in the checkpoint, so that adapters find them.

    What a linear layer multiplies by is stored [in, out] and has lost its name on the way; its module is known.
    """
    names: dict[str, str] = {}
    for node in graph:
        scopes = node.metadata_props.get(_SCOPES)
        weight = node.inputs[1] if node.op_type == "MatMul" and scopes else None
        if weight is not None and weight.is_initializer() and weight.name.startswith(_FOLDED):
            modules = [scope for scope in ast.literal_eval(scopes) if scope.startswith(_MODULE_PREFIXES)]
            names[weight.name] = f"{modules[-1]}.weight"
    for value in list(graph.initializers.values()):
        name = names.get(value.name, value.name)
        prefix = next((one for one in _MODULE_PREFIXES if name.startswith(one)), "")
        if prefix and name.removeprefix(prefix) not in graph.initializers:
            graph.initializers.pop(value.name)
            value.name = name.removeprefix(prefix)
            graph.initializers[value.name] = value


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"
