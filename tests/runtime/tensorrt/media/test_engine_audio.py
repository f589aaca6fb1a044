"""A request with audio answered by ONNX Runtime, from its file to its tokens."""

import pytest
import torch

from tests.deployments.media.media_checkpoint import write_checkpoint
from tests.deployments.media.test_audio_requests import SOUNDS, answered, generated, request_of
from tests.runtime.models import CHAIN, engine_config
from tests.runtime.tensorrt.engine_world import LIMITS
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.tensorrt.backend import open_backend
from wingbeat.runtime.tensorrt.build import BuildPlan, export_directory
from wingbeat.runtime.tensorrt.media.engine_encoder import EngineMediaEncoder

for library in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(library)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUNDS)
def test_the_answer_to_a_request_with_audio_is_that_of_generate(name, tmp_path):
    folder, cpu = write_checkpoint(name, tmp_path / "model"), torch.device("cpu")
    directory = export_directory(BuildPlan(folder, None, tmp_path / "engines", torch.float32, LIMITS))
    opened = open_backend(directory.folder, folder, engine_config(CHAIN, max_num_seqs=3, num_kv_blocks=None), cpu)
    engine = Engine(opened.loaded, opened.limits, DrafterNeeds(), backend=opened.backend)
    assert isinstance(engine.loaded.reader.encoder, EngineMediaEncoder)
    assert answered(engine, request_of(name, folder, engine.loaded.vocab_size)) == generated(name, folder)
    assert engine.stats().parts["media"]["num_encoded"] == len(SOUNDS[name])
