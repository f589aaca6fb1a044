"""Models whose weights stay packed: whole rounds on the GPU of numbers, from the load of their files."""

from functools import partial

import pytest
import torch

pytest.importorskip("gguf")
from tests.gpu_of_numbers.device import CUDA
from tests.gpu_of_numbers.engine_cases import SHAPE, params
from tests.runtime.models import Run, engine_config, generate, random_head, random_prompts
from tests.runtime.quantised.gguf_architectures import write_architecture
from tests.runtime.quantised.gguf_world import write_model
from tests.runtime.quantised.test_checkpoints import CASES, save_mxfp4, save_quantised
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.fused.layers import FusedLayer
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.heads.lendable import lendable
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.packed.modules import PackedExperts, PackedLinear
from wingbeat.runtime.verifier.loading.loader import load_model

PROMPTS = random_prompts((5, 9))


def write(folder, kind):
    """A model of two layers of a form of GGUF, or of a kind of checkpoint."""
    if kind == "experts":
        write_architecture(folder / "tiny.gguf", "qwen3moe", "Q4_0")
        return checkpoint_folder(folder)
    if kind == "mxfp4":
        save_mxfp4(folder)
        return folder
    if kind in CASES:
        save_quantised(folder, *CASES[kind])
        return folder
    write_model(folder / "tiny.gguf", kind, tied=kind == "Q8_0")
    return checkpoint_folder(folder)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "fp8", "awq", "experts", "mxfp4"])
def test_captured_rounds_of_packed_weights_write_what_the_cpu_writes(gpu, tmp_path, kind):
    folder = write(tmp_path, kind)
    expected = generate(
        load_model(folder, torch.float32, torch.device("cpu"), packed=False),
        engine_config(SHAPE),
        None,
        PROMPTS,
        params(False),
    )[0]
    loaded = load_model(folder, torch.float32, CUDA)
    if kind in ("experts", "mxfp4"):
        assert sum(isinstance(one, PackedExperts) for one in loaded.model.modules()) == len(loaded.layers)
    else:
        linears = [one for one in loaded.model.modules() if isinstance(one, torch.nn.Linear)]
        assert sum(isinstance(one, PackedLinear) for one in linears) >= len(linears) - 1
        assert all(isinstance(layer, FusedLayer) for layer in loaded.decoder_layers)
    save_eagle_head(random_head(loaded), folder / "head")
    target = TargetDescription.from_checkpoint(folder, lendable(loaded, torch.float32).get)
    limits = engine_config(SHAPE, max_num_seqs=2, max_model_len=64, max_num_batched_tokens=8, num_kv_blocks=16)
    for speculation in (True, False):
        drafter = None
        if speculation:
            drafter = load_drafter(folder / "head", target, SHAPE, DrafterOptions(torch.float32, "cuda"))
        engine = build_engine(loaded, limits, drafter, partial(InProcessChannel, device=CUDA))
        assert Run(engine, PROMPTS, params(speculation)).finish() == expected
        stats = engine.runner.graphs.stats
        assert stats.failed == []
        assert not stats.eager_runs
        assert stats.replays[Stage.BASE_VERIFICATION if speculation else Stage.BASE_DECODING]
        engine.model.remove_taps()
    assert gpu.launches["_packed_product_kernel"] > 0
    assert kind == "mxfp4" or gpu.launches["_unpack_kernel"] > 0
