"""Exported encoders, and texts behind images and sounds by ONNX Runtime."""

import pytest
import torch

from tests.runtime.media.media_world import ShownRun, random_model, shown
from tests.runtime.media.test_drafter_sees import GRIDS, Dense, check, head_for
from tests.runtime.models import CHAIN, engine_config, greedy_params
from tests.runtime.tensorrt.engine_world import LIMITS
from tests.runtime.tensorrt.media.drafts_watched import drafts_within
from tests.runtime.tensorrt.media.images_world import SOUNDS
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.llm import connect
from wingbeat.runtime.tensorrt.backend import open_backend
from wingbeat.runtime.tensorrt.build import BuildPlan, export_directory
from wingbeat.runtime.tensorrt.engine_drafter import EngineDrafter
from wingbeat.runtime.tensorrt.open_drafter import open_drafter

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava", *SOUNDS])
@pytest.mark.parametrize("shape", ["chain", "plain"])
def test_text_and_drafts_behind_images_by_onnx_runtime_are_those_of_torch(name, shape, tmp_path):
    ref, model, head = shown(name), tmp_path / "model", None
    rounded = head_for(name).bfloat16().float()  # as a checkpoint holds it
    random_model(name).save_pretrained(model)
    if shape == "chain":
        head = tmp_path / "head"
        save_eagle_head(rounded, head)
    plan = BuildPlan(model, head, tmp_path / "engines", torch.float32, LIMITS)
    directory = export_directory(plan)
    assert directory.base.is_vlm == (name not in SOUNDS)
    encoder = "audio" if name in SOUNDS else "visual"
    assert {f"{encoder}.onnx", "eagle_base.onnx"} <= directory.base.files.keys()
    cpu, limits = torch.device("cpu"), engine_config(CHAIN, max_num_seqs=3, num_kv_blocks=None)
    drafter = None if head is None else open_drafter(directory.folder, head, model, CHAIN, cpu)
    opened = open_backend(directory.folder, model, limits, cpu)
    needs = DrafterNeeds() if drafter is None else drafter.needs
    engine = Engine(opened.loaded, opened.limits, needs, backend=opened.backend)
    if drafter is not None:
        connect(engine, drafter, InProcessChannel)
    with drafts_within(EngineDrafter, ref) as drafts:
        texts = ShownRun(engine, ref.prompts, ref.media, greedy_params(16)).finish()
    assert texts == [more[:16] for more in ref.continuations]
    if drafter is not None:
        assert (drafter.config.num_axes, drafter.config.media_width) == (3 if name in GRIDS else 0, 64)
        check(drafts, Dense(rounded, name), 2 * 16 + 1)
