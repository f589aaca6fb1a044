"""Mixtures whose code in transformers computes every expert: the chosen experts alone give the same numbers."""

import pytest
import torch
from transformers import Llama4TextConfig

pytest.importorskip("triton")

from tests.runtime.fake_gpu import fake_gpu, why_not
from tests.runtime.gpu_world import CHAIN, IDS, SHAPE, new_model, placed_verifier
from tests.runtime.launch_counts import captured
from tests.runtime.models import Run, engine_config, greedy, greedy_params, new_engine, random_prompts
from wingbeat.runtime.experts.dense_blocks import ChosenExperts
from wingbeat.runtime.experts.forward import fuse_mixtures
from wingbeat.runtime.verifier.loading.loader import prepare_model

FIELDS = SHAPE | IDS | {"tie_word_embeddings": False, "num_hidden_layers": 2, "intermediate_size_mlp": 96}


def config(top_k: int = 1, step: int = 1) -> Llama4TextConfig:
    return Llama4TextConfig(
        **FIELDS,
        num_local_experts=4,
        num_experts_per_tok=top_k,
        interleave_moe_layer_step=step,
        attention_chunk_size=512,
    )


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [layer.feed_forward for layer in model.model.layers]


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@torch.inference_mode()
def test_the_chosen_experts_are_those_that_count(top_k, num_rows):
    model = new_model(config(top_k)).float()
    rows = torch.randn(1, num_rows, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(1))
    expected = [block(rows) for block in blocks_of(model)]
    fuse_mixtures(model)
    for block, theirs in zip(blocks_of(model), expected, strict=True):
        assert isinstance(block, ChosenExperts)
        for ours, their in zip(block(rows), theirs, strict=True):
            torch.testing.assert_close(ours, their, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_experts_that_no_row_has_are_not_read():
    model = new_model(config()).float()
    fuse_mixtures(model)
    block, rows = blocks_of(model)[0], torch.randn(3, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(1))
    expected, logits = block(rows)
    for expert in set(range(4)) - set(logits.argmax(dim=1).tolist()):
        block.experts.gate_up_proj.data[expert] = torch.nan
    assert torch.equal(block(rows)[0], expected)


@torch.inference_mode()
def test_a_router_of_another_class_is_called():
    """An adapter replaces its class."""
    model = new_model(config()).float()
    fuse_mixtures(model)
    block, rows = blocks_of(model)[0], torch.randn(3, SHAPE["hidden_size"])
    kind = type(block.router)
    block.router.__class__ = type("Other", (kind,), {"forward": lambda self, rows: kind.forward(self, -rows)})
    assert torch.equal(block(rows)[1], -rows @ block.router.weight.t())


def test_the_text_is_that_of_generate():
    prompts = random_prompts((11, 3))
    expected, _ = greedy(new_model(config(step=2)).float(), prompts, 8)
    model = new_model(config(step=2)).float()
    fuse_mixtures(model)
    assert [isinstance(block, ChosenExperts) for block in blocks_of(model)] == [False, True]
    engine = new_engine(prepare_model(model, "llama4"), engine_config(max_num_batched_tokens=8))
    assert Run(engine, prompts, greedy_params(8)).finish() == expected


def test_rounds_are_captured():
    if (reason := why_not()) is not None:
        pytest.skip(f"no fake GPU: {reason}")
    with fake_gpu() as gpu:
        loaded = placed_verifier(config())
        assert all(isinstance(block, ChosenExperts) for block in blocks_of(loaded.model))
        captured(gpu, CHAIN, loaded)
