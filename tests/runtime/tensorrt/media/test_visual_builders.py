"""TensorRT-RTX takes the graphs of vision encoders, on a machine without a GPU."""

import pytest
import torch

from tests.runtime.media.media_world import random_model
from tests.runtime.tensorrt.test_builders import CAPABILITIES, LIMITS, builder  # noqa: F401 - a fixture
from wingbeat.runtime.tensorrt.graph_ops import GraphOps
from wingbeat.runtime.tensorrt.media.visual_graph import export_visual, visual_of, visual_profiles
from wingbeat.runtime.verifier.loading.loader import prepare_model


@pytest.mark.tensorrt
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava", "gemma3"])
def test_the_builder_takes_vision_encoders_for_three_gpus(builder, name, tmp_path):  # noqa: F811
    loaded, file = prepare_model(random_model(name), name), tmp_path / "visual.onnx"
    loaded.model.to(torch.float16)
    export_visual(loaded, visual_of(loaded), LIMITS, GraphOps(24, torch.float16), file)
    for capability in CAPABILITIES:
        builder.build(file, visual_profiles(LIMITS), tmp_path / f"{capability}.engine", (capability,))
        assert (tmp_path / f"{capability}.engine").stat().st_size > 0
