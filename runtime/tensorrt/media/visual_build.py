"""From a loaded model's vision encoder to its graph and the sizes that it is built for."""

from pathlib import Path

from wingbeat.runtime.tensorrt.engine_config import EngineVisual
from wingbeat.runtime.tensorrt.export import export_module
from wingbeat.runtime.tensorrt.graph_ops import GraphOps
from wingbeat.runtime.tensorrt.graph_shapes import TOKENS, Profile, SizeRange
from wingbeat.runtime.tensorrt.limits import Limits
from wingbeat.runtime.tensorrt.media.visual_graph import VisualGraph, as_visual_graph, visual_of, visual_shapes
from wingbeat.runtime.tensorrt.session import VISUAL_STAGES, EngineStage
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

__all__ = ["export_visual", "visual_of", "visual_profiles"]


def export_visual(loaded: LoadedModel, visual: EngineVisual, limits: Limits, ops: GraphOps, file: Path) -> None:
    """Write the graph of a model's vision encoder, its weights in a file beside it, checked.

    Raises:
        ExportError: torch or onnx refuse it.
    """
    shapes = visual_shapes(visual, loaded.hidden_size, loaded.dtype)
    with as_visual_graph(loaded, visual):
        module = VisualGraph(loaded, visual, list(shapes.inputs)).eval()
        export_module(module, module.arguments, shapes, limits, ops.opset, file)


def visual_profiles(limits: Limits) -> dict[EngineStage, Profile]:
    """Sizes of the vision encoder's stage."""
    [stage] = VISUAL_STAGES
    return {stage: {TOKENS: SizeRange(1, limits.max_image_tokens, limits.max_image_tokens)}}
