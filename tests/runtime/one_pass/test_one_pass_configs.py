"""The configs of published one-pass heads mean what they should, or are refused for the true reason."""

import pytest

from tests.runtime.one_pass.published_heads import DFLASH, DFLASH2, DSPARK, FIVE, PEAGLE, PUBLISHED, Published
from wingbeat.runtime.head_families.families import ONE_PASS, family_told
from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.heads.layouts import UnsupportedCheckpointError, recognise
from wingbeat.runtime.one_pass.config import Slots
from wingbeat.runtime.one_pass.families import OnePassFamily, one_pass_family
from wingbeat.runtime.one_pass.load import file_name
from wingbeat.runtime.one_pass.read_config import read_one_pass_config


def read(one: Published, **fields):
    raw = one.raw | fields
    names = one.tensors or ("fc.weight", "hidden_norm.weight")
    assert one_pass_family(raw, names) is one.family
    shapes = {"fc.weight": (one.raw.get("hidden_size", 4096), len(one.taps) * one.target_hidden)}
    return read_one_pass_config(raw, one.family, shapes, one.target_hidden, one.num_layers)


@pytest.mark.parametrize("one", PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_config_is_read(one):
    config = read(one)
    assert (config.slots, config.block_size) == (one.slots, one.block)
    assert config.num_drafted == one.block - (one.slots is Slots.FILL_IN)
    assert (config.tap_layers, config.mask_token_id) == (one.taps, one.mask)
    assert set(config.masks) == one.masks
    assert config.markov == one.markov
    assert config.rope_parameters["rope_theta"] == one.theta
    assert config.draft_vocab_size == one.draft_vocab


@pytest.mark.parametrize(
    ("raw", "names", "family"),
    [
        ({"architectures": ["Qwen3XPressModel"], "dflash_config": {}}, ("mix.L",), "xPress"),
        ({"dflash_config": {}}, ("layers.0.x", "mix.L"), "xPress"),
        ({"architectures": ["LiLiCorrDraftModel"]}, (), "LiLiCorr"),
        ({"dflash_config": {"projector_type": "domino", "shift_label": True}}, (), "Domino"),
        ({"architectures": ["DFlashDraftModel"]}, ("prefix_gru.weight_ih_l0",), "Domino"),
        ({"architectures": ["DFlareDraftModel"]}, (), "DFlare"),
        ({"architectures": ["Eagle4ForCausalLM"]}, (), "EAGLE-4"),
        ({"dflash_config": {}}, ("efficient_lm_head.weight",), "EAGLE-4"),
    ],
)
def test_what_refines_a_block_otherwise_is_refused_by_name(raw, names, family):
    assert family_told(raw, names) == family
    assert one_pass_family(raw, names) is None
    why = (
        "its licence allows no independent server"
        if family == "EAGLE-4"
        else "heads of EAGLE-1.*and of DFlash, DFlash2"
    )
    with pytest.raises(UnsupportedCheckpointError, match=f"^{family} is not supported: {why}"):
        recognise(raw, names)


@pytest.mark.parametrize(
    ("names", "family"),
    [
        (("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight"), DFLASH),
        (("fc.weight", "hidden_norm.weight", "markov_head.markov_w1.weight"), DSPARK),
        (("fc.weight", "candidate_selector.predecessor_codebook"), DFLASH2),
        (("fc.weight", "layers.0.hidden_norm.weight", "mask_hidden"), PEAGLE),
        (("fc.weight", "midlayer.hidden_norm.weight"), None),
        (("fc.weight", "layers.0.hidden_norm.weight"), None),
        (("mtp.0.markov_head.markov_w1.weight", "model.layers.0.mlp.up_proj.weight"), None),
    ],
)
def test_tensors_tell_a_family_whose_config_says_nothing(names, family):
    assert one_pass_family({"architectures": ["LlamaForCausalLM"]}, names) is family


@pytest.mark.parametrize(
    ("raw", "family"),
    [
        ({"architectures": ["PEagleDraftModel"]}, PEAGLE),
        ({"speculators_model_type": "peagle"}, PEAGLE),
        ({"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True}, PEAGLE),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark"}}, DSPARK),
        ({"architectures": ["DFlash2BeamDraftModel"]}, DFLASH2),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, None),
    ],
)
def test_configs_tell_a_family(raw, family):
    assert one_pass_family(raw, ("fc.weight",)) is family


BASE = PUBLISHED["z-lab/Qwen3-8B-DFlash-b16"]
SLIDING = ["sliding_attention"] * 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["Gemma4DSparkModel"], "markov_rank": None, "model_type": "gemma4"}, "a Gemma body"),
        ({"kv_lora_rank": 512}, "MLA attention is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"sample_from_anchor": True}, "sample_from_anchor=True is not supported in a DFlash head"),
        ({"num_target_layers": 28}, "num_target_layers=28 differs from the target's 36"),
        ({"layer_types": SLIDING}, "a layer has sliding attention, but neither"),
        ({"layer_types": SLIDING[:2]}, "are not 5 of full or sliding attention"),
        ({"block_size": 1}, "block_size=1 is not in 2..1024"),
        ({"block_size": 1 << 40}, "block_size=1099511627776 is not in 2..1024"),
        ({"block_size": None}, "block_size=None is not an integer"),
        (
            {"dflash_config": {"target_layer_ids": FIVE}},
            "states no mask token, in none of the fields mask_token_id, dspark_noise",
        ),
        ({"dflash_config": {"mask_token_id": 200000, "target_layer_ids": FIVE}}, "mask_token_id=200000 is outside"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 9]}}, "fc.weight reads 20480 values: 2 taps"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [9, 1]}}, "not the ascending ids of layers"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 99]}}, "not the ascending ids of layers"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 35]}},
            "the last layer's output before its norm",
        ),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": "all"}}, "is not a list of integers"),
        ({"dflash_config": 3}, "dflash_config=3 is not an object"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not one of"),
    ],
)
def test_a_config_that_cannot_be_read_says_why(fields, message):
    raw = BASE.raw | fields

    def read_it():
        family = one_pass_family(raw, ("fc.weight",))
        return read_one_pass_config(raw, family, {"fc.weight": (4096, 5 * 4096)}, 4096, 36)

    with pytest.raises(CheckpointError, match=message):
        read_it()


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "layers.3.self_attn.q_proj.weight"),
        ("midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("encoder.fc.weight", "fc.weight"),
        ("encoder.output_norm_enc.weight", "hidden_norm.weight"),
        ("markov_w1.weight", "markov_head.markov_w1.weight"),
        ("layers.0.mlp.gate_proj.weight", "layers.0.mlp.gate_proj.weight"),
    ],
)
def test_names_of_every_tool_are_one(stored, canonical):
    assert file_name(stored) == canonical


def test_each_family_that_is_told_apart_is_a_family_that_is_read():
    assert sorted(ONE_PASS) == sorted(OnePassFamily)
