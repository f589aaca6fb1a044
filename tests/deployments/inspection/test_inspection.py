"""Inspection reports what a folder's files hold: heads of every format, models, prediction modules."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, Gemma4TextConfig

from tests.runtime.eagle_formula import random_weights
from tests.runtime.head_formats import FORMATS, NUM_LAYERS, VOCAB
from tests.runtime.heads.head_folder import target_of
from tests.runtime.models import WINDOW, random_model
from wingbeat.deployments.inspection.command import inspect_head, inspect_model
from wingbeat.runtime.heads.load import CheckpointError, head_conventions, load_eagle_head
from wingbeat.runtime.heads.target import TargetDescription

pytestmark = pytest.mark.few(3)

CPU = torch.device("cpu")


def write_head(name, folder):
    """A head in a format, and the verifier it is for."""
    chosen = FORMATS[name]
    weights = random_weights(chosen.recipe, VOCAB, chosen.draft_vocab)
    chosen.write(folder, weights)
    return chosen, weights, TargetDescription(Path("verifier"), chosen.recipe.target_hidden, NUM_LAYERS, VOCAB)


@pytest.mark.parametrize("name", FORMATS)
def test_a_head_of_every_format_is_described_as_it_loads(name, tmp_path):
    chosen, weights, target = write_head(name, tmp_path)
    found = inspect_head(tmp_path, target, torch.bfloat16)
    lends = target_of(target.hidden_size, NUM_LAYERS, VOCAB, weights["embed"], weights["lm_head"])
    head = load_eagle_head(tmp_path, lends)
    assert found["convention"]["likeliest"] == head.convention._asdict()
    assert found["convention"]["likeliest"]["tap_layers"] == chosen.taps
    assert found["convention"]["readings"] == [one._asdict() for one in head_conventions(tmp_path, target)]
    assert bool(found["convention"]["open_fields"]) == (len(found["convention"]["readings"]) > 1)
    own = [tensor for key, tensor in weights.items() if key not in (*chosen.leaves_out, "d2t")]
    assert found["parameters"] == sum(tensor.numel() for tensor in own)
    assert found["memory"]["weights_bytes"] == 2 * found["parameters"]
    both = head.head_dim + getattr(head, "value_dim", head.head_dim)
    layers = found["memory"]["kv_bytes_per_token"] / (2 * head.num_key_value_heads * both)
    assert layers == head.num_layers
    lent = {"embed": "embed_tokens.weight", "lm_head": "lm_head.weight"}
    assert set(found["from_verifier"]) == {lent[key] for key in chosen.leaves_out}
    assert {key: found["shapes"][key] for key in ("hidden_size", "num_taps", "draft_vocab_size")} == {
        "hidden_size": head.hidden_size,
        "num_taps": head.config.num_taps,
        "draft_vocab_size": len(head.draft_token_ids),
    }
    assert json.loads(json.dumps(found))["format"] == found["format"]


@pytest.mark.parametrize("name", FORMATS)
def test_without_the_verifier_only_what_depends_on_its_depth_is_missing(name, tmp_path):
    _, _, target = write_head(name, tmp_path)
    alone, known = (inspect_head(tmp_path, verifier, torch.float32) for verifier in (None, target))
    assert (alone["format"], alone["parameters"], alone["memory"]) == (
        known["format"],
        known["parameters"],
        known["memory"],
    )
    assert alone["shapes"] == known["shapes"]
    assert alone["convention"]["readings"] == []
    for field, value in alone["convention"]["likeliest"].items():
        assert value == known["convention"]["likeliest"][field] or (field == "tap_layers" and value is None)
    assert set(known["convention"]["open_fields"]) <= set(alone["convention"]["open_fields"])


def test_a_verifier_that_the_head_is_not_for_is_an_error(tmp_path):
    _, _, target = write_head("specforge", tmp_path)
    wide = TargetDescription(target.path, 2 * target.hidden_size, NUM_LAYERS, VOCAB)
    with pytest.raises(CheckpointError, match="hidden_size"):
        inspect_head(tmp_path, wide, torch.float32)


def test_a_model_is_described_by_its_probe(tmp_path):
    model = random_model("gemma3")
    model.save_pretrained(tmp_path)
    found = inspect_model(tmp_path, torch.float32, CPU)
    assert found["format"] == "Gemma3ForCausalLM"
    assert found["parameters"] == sum(math.prod(p.shape) for p in model.parameters())
    assert found["memory"]["kv_bytes_per_token"] == 4 * 2 * 2 * 16 * 4
    assert found["probe"]["can_be_verifier"]
    spans = [(group["first"], group["last"], group["sliding_window"]) for group in found["probe"]["layers"]]
    assert spans == [(0, 0, WINDOW), (1, 1, None), (2, 2, WINDOW), (3, 3, None)]
    assert found.get("mtp") is None
    assert json.loads(json.dumps(found))["kind"] == "model"


def test_equal_layers_are_told_once(tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    (group,) = inspect_model(tmp_path, torch.float32, CPU)["probe"]["layers"]
    assert (group["first"], group["last"], group["num_heads"], group["num_kv_heads"]) == (0, 3, 4, 2)


def test_layers_of_different_shapes_are_told_apart(tmp_path):
    """A config that refuses to name one head size for all of them."""
    size = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 97,
        "num_hidden_layers": 4,
        "hidden_size_per_layer_input": 0,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
    config = Gemma4TextConfig(**size, **heads, **kinds, num_kv_shared_layers=0, vocab_size_per_layer_input=97)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = inspect_model(tmp_path, torch.float32, CPU)
    assert [group["key_dim"] for group in found["probe"]["layers"]] == [16, 32, 16, 32]


def test_a_model_that_cannot_be_the_verifier_says_why(tmp_path):
    torch.manual_seed(0)
    config = FalconConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = inspect_model(tmp_path, torch.float32, CPU)
    assert not found["probe"]["can_be_verifier"]
    assert "Falcon" in found["probe"]["reason"]
