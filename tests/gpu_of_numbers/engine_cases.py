"""Two layers of random weights and a random head: whole rounds on the GPU of numbers, in seconds."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.gpu_of_numbers.device import CUDA
from tests.runtime.models import Run, engine_config, generate, random_head, random_model, random_prompts
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.heads.lendable import lendable
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import EMBEDDING, TargetDescription
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.loading.loader import prepare_model

SHAPE = SpeculationConfig(draft_steps=1, draft_top_k=2, verify_tree_size=3)
PROMPTS = random_prompts((5, 9))
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 5}


def params(speculation: bool) -> list[SamplingParams]:
    """Parameters of a greedy request and of a sampled one."""
    fields = {"max_tokens": 4, "ignore_eos": True, "speculation": speculation}
    return [SamplingParams(**fields, **way) for way in (GREEDY, SAMPLED)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Plain texts of the CPU."""
    loaded = prepare_model(random_model("llama", num_hidden_layers=2), "llama")
    return generate(loaded, engine_config(SHAPE), None, PROMPTS, params(False))[0]


@pytest.fixture(scope="module")
def engine(gpu, tmp_path_factory):
    """Its head reads the verifier's embedding where that lies."""
    folder, model = tmp_path_factory.mktemp("pair"), random_model("llama", num_hidden_layers=2)
    model.save_pretrained(folder)
    loaded = prepare_model(model.to(CUDA), "llama")
    torch.manual_seed(3)
    head = EagleHead(replace(random_head(loaded).config, hidden_size=loaded.hidden_size))
    save_eagle_head(head, folder / "head")
    file = folder / "head" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != EMBEDDING}, file)
    target = TargetDescription.from_checkpoint(folder, lendable(loaded, torch.float32).get)
    drafter = load_drafter(folder / "head", target, SHAPE, DrafterOptions(torch.float32, "cuda"))
    lent = drafter.head.embed_tokens.weight
    assert lent.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    limits = engine_config(SHAPE, max_num_seqs=2, max_model_len=64, max_num_batched_tokens=8, num_kv_blocks=16)
    return build_engine(loaded, limits, drafter, partial(InProcessChannel, device=CUDA))


@pytest.mark.parametrize("speculation", [True, False], ids=["drafted", "plain"])
def test_captured_rounds_write_what_the_cpu_writes(gpu, engine, expected, speculation):
    assert Run(engine, PROMPTS, params(speculation)).finish() == expected
    stats = engine.runner.graphs.stats
    assert stats.failed == []
    assert not stats.eager_runs
    assert stats.replays[Stage.BASE_VERIFICATION if speculation else Stage.BASE_DECODING]
    assert stats.replays[Stage.BASE_MIXED], "the rest of the second prompt beside the first one's tokens"
    assert gpu.launches["tree_attention_kernel"] > 0
    assert engine.drafter_state == "attached"
    engine.check_integrity()
