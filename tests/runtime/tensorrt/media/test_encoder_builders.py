"""TensorRT-RTX takes the graphs of encoders, on a machine without a GPU."""

import pytest
import torch

from tests.runtime.media.media_world import random_model
from tests.runtime.tensorrt.media.images_world import SOUNDS
from tests.runtime.tensorrt.test_builders import CAPABILITIES, LIMITS, builder  # noqa: F401 - a fixture
from wingbeat.runtime.tensorrt.graph_ops import GraphOps
from wingbeat.runtime.tensorrt.media.encoder_graph import encoder_of, encoder_profiles, export_encoder
from wingbeat.runtime.verifier.loading.loader import prepare_model


@pytest.mark.tensorrt
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava", "gemma3", *SOUNDS])
def test_the_builder_takes_encoders_for_three_gpus(builder, name, tmp_path):  # noqa: F811
    loaded, file = prepare_model(random_model(name), name), tmp_path / "encoder.onnx"
    loaded.model.to(torch.float16)
    export_encoder(loaded, encoder_of(loaded), LIMITS, GraphOps(24, torch.float16), file)
    for capability in CAPABILITIES:
        builder.build(file, encoder_profiles(LIMITS), tmp_path / f"{capability}.engine", (capability,))
        assert (tmp_path / f"{capability}.engine").stat().st_size > 0
