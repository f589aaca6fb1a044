"""Exports checkpoints to ONNX: the verifier as eagle_base.onnx, the draft head as eagle_draft.onnx.

One graph serves every stage: batch, rows and selected rows are free dimensions; the KV capacity and all widths are
    fixed.
"""

import ast
import logging
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from wingbeat.runtime.heads.contract import DraftHead
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.tensorrt.base_graph import BaseGraph, as_graph
from wingbeat.runtime.tensorrt.block_graph import BlockGraph, layer_masks
from wingbeat.runtime.tensorrt.draft_graph import DraftGraph
from wingbeat.runtime.tensorrt.engine_config import DraftMedia, EngineEncoder, Limits
from wingbeat.runtime.tensorrt.graph_ops import GraphOps
from wingbeat.runtime.tensorrt.graph_shapes import (
    BATCH,
    ROWS,
    SELECTED,
    TOKENS,
    GraphShapes,
    base_shapes,
    block_mask_name,
    draft_shapes,
)
from wingbeat.runtime.tensorrt.more_inputs import MoreInputs
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

_MODULE_PREFIXES = ("model.", "head.")
_SCOPES = "pkg.torch.onnx.name_scopes"
_FOLDED = "val_"
_NOISE = ("torch.onnx", "torch._dynamo", "torch.export", "onnxscript", "onnx_ir")


class ExportError(ValueError):
    """A graph cannot be exported, or the exported file is invalid; the message names the file."""


def export_base(
    loaded: LoadedModel,
    tap_layers: tuple[int, ...],
    limits: Limits,
    ops: GraphOps,
    file: Path,
    more: MoreInputs | None = None,
    encoder: EngineEncoder | None = None,
) -> None:
    """Export a verifier's graph, with weights in a separate file, and check it.

    Args:
        loaded: the verifier on the CPU, in the dtype of the engine.
        tap_layers: layers whose inputs the graph outputs, concatenated; empty for none.
        limits: limits of the shapes.
        ops: operators of the export.
        file: ONNX file to write.
        more: optional inputs of a runtime part.
        encoder: vision or audio encoder of the model; None if the model takes no media.

    Raises:
        UnsupportedModelError: the model has a feature that the graphs do not support.
        ExportError: torch or onnx cannot export it.
    """
    taps_size = len(tap_layers) * loaded.hidden_size
    with as_graph(loaded, ops):
        module = BaseGraph(loaded, tap_layers, ops, more, encoder)
        try:
            shapes = base_shapes(
                loaded.layers,
                loaded.windows,
                vocab_size=loaded.vocab_size,
                taps_size=taps_size,
                capacity=limits.capacity,
                dtype=loaded.dtype,
                more=more,
                encoder=encoder,
                hidden_size=loaded.hidden_size,
            )
            export_module(module.eval(), module.arguments, shapes, limits, ops.opset, file)
        finally:
            module.release()


def export_draft(
    head: DraftHead | OnePassHead, limits: Limits, ops: GraphOps, file: Path, media: DraftMedia = DraftMedia()
) -> None:
    """Export a draft head's graph, with weights in a separate file, and check it.

    Args:
        head: the head.
        limits: limits of the shapes.
        ops: operators of the export.
        file: ONNX file to write.
        media: media inputs; see `media_of`.

    Raises:
        ExportError: torch or onnx cannot export it.
    """
    config, vocab_size, masks = head.config, len(head.draft_token_ids), []
    heads, sizes = config.num_key_value_heads, (config.head_dim, getattr(head, "value_dim", config.head_dim))
    if isinstance(head, OnePassHead):
        module, num_layers = BlockGraph(head, ops), config.num_layers
        masks = [block_mask_name(*mask) for mask in layer_masks(head)]
    else:
        module, num_layers = DraftGraph(head, ops, media), head.num_layers
    layers = [LayerAttention(heads, heads, *sizes, None)] * num_layers
    sizes = (vocab_size, head.taps_size, config.hidden_size, limits.capacity, head.dtype)
    shapes = draft_shapes(layers, *sizes, masks, media)
    export_module(module.eval(), module.arguments, shapes, limits, ops.opset, file)


def _examples(shapes: GraphShapes, limits: Limits) -> list[Tensor]:
    """Inputs for tracing a graph; free dimensions have sizes above 1, because torch treats a size of 1 as a
    constant.
    """
    sizes = {BATCH: 2, ROWS: min(5, limits.max_input_len), SELECTED: 3, TOKENS: 6}
    return [
        torch.zeros([sizes.get(dim, dim) for dim in spec.shape], dtype=spec.dtype) for spec in shapes.inputs.values()
    ]


def _free_dims(shapes: GraphShapes, limits: Limits) -> list[dict[int, Dim | None]]:
    """For each input, its dimensions by index. Fixed dimensions are listed as None, because torch drops an input whose
    entry is empty.
    """
    most = max(limits.max_input_len, limits.max_verify_tree_size, limits.max_draft_tree_size, 8)
    dims = {
        BATCH: Dim(BATCH, min=1, max=max(limits.max_batch_size, 2)),
        ROWS: Dim(ROWS, min=1, max=most),
        SELECTED: Dim(SELECTED, min=1, max=most),
        TOKENS: Dim(TOKENS, min=1, max=max(limits.max_image_tokens, 8)),
    }
    return [{index: dims.get(dim) for index, dim in enumerate(spec.shape)} for spec in shapes.inputs.values()]


def check_exporter() -> None:
    """Raises ExportError (one line that says what to install) if torch cannot export here."""
    for package in ("onnx", "onnxscript"):
        if find_spec(package) is None:
            raise ExportError(f"{package} is not installed: pip install 'wingbeat[onnx]'")


def export_module(
    module: nn.Module, arrange: Callable[[list], tuple], shapes: GraphShapes, limits: Limits, opset: int, file: Path
) -> None:
    """Export a module's graph, with weights in a separate file, and check it.

    Args:
        module: the module.
        arrange: groups a flat list with one entry per input into the module's arguments.
        shapes: shapes of inputs and outputs.
        limits: limits of the shapes.
        opset: ONNX opset.
        file: ONNX file to write.

    Raises:
        ExportError: torch or onnx cannot export it.
    """
    from onnx import checker, shape_inference

    for name in _NOISE:
        logging.getLogger(name).setLevel(logging.ERROR)
    args, dims = arrange(_examples(shapes, limits)), arrange(_free_dims(shapes, limits))
    names = {"input_names": list(shapes.inputs), "output_names": list(shapes.outputs)}
    options: dict[str, Any] = {"opset_version": opset, "dynamo": True, "verbose": False}
    try:
        # Gradients are enabled because the model then does not use Wingbeat's CPU kernels, which a graph cannot
        # contain.
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(module, args, dynamic_shapes=dims, **names, **options)
            _name_weights(program.model.graph)
            program.save(file, external_data=True)
    except Exception as error:  # torch may wrap any exception that tracing raises
        raise ExportError(f"{file.name}: torch.onnx cannot export it: {_cause(error)}") from error
    try:
        checker.check_model(file, full_check=True)
    except (checker.ValidationError, shape_inference.InferenceError) as error:
        raise ExportError(f"{file.name}: onnx.checker refuses it: {_cause(error)}") from error


def _name_weights(graph: Any) -> None:
    """Renames the graph's weights to their names in the checkpoint, so that tools find them.

    The export stores the weight of a linear layer transposed, [in, out], and without its name; the name is therefore
    derived from the module's name.
    """
    names: dict[str, str] = {}
    for node in graph:
        scopes = node.metadata_props.get(_SCOPES)
        weight = node.inputs[1] if node.op_type == "MatMul" and scopes else None
        if weight is not None and weight.is_initializer() and weight.name.startswith(_FOLDED):
            modules = [scope for scope in ast.literal_eval(scopes) if scope.startswith(_MODULE_PREFIXES)]
            if modules:  # without a module the weight is a slice of a matrix, which has no name
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
