"""The configs of published one-pass heads mean what they should, or are refused for the true reason.

Written anew from what is known of them: fields as their tools name them, sizes as published.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from wingbeat.runtime.heads.families import OnePassFamily, family_told, one_pass_family
from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.heads.layouts import UnsupportedCheckpointError, recognise
from wingbeat.runtime.heads.one_pass.config import LayerMask, MarkovConfig, MarkovKind, Slots
from wingbeat.runtime.heads.one_pass.load import file_name
from wingbeat.runtime.heads.one_pass.read_config import read_one_pass_config

DFLASH, DFLASH2, DSPARK, JETSPEC, PEAGLE = (
    getattr(OnePassFamily, name) for name in ("DFLASH", "DFLASH2", "DSPARK", "JETSPEC", "PEAGLE")
)
MASK = 151669
FIVE = [1, 9, 17, 25, 33]


def qwen3(**fields) -> dict[str, Any]:
    """The layers of a head for Qwen3-8B."""
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"head_dim": 128, "num_hidden_layers": 5, "vocab_size": 151936, "max_position_embeddings": 40960}
    return {"model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000, **sizes, **fields}


def of(architecture: str, **fields) -> dict[str, Any]:
    return qwen3(architectures=[architecture], **fields)


@dataclass(frozen=True)
class Published:
    """A head's config, its verifier's layers and width, and what must come of them."""

    raw: dict[str, Any]
    family: OnePassFamily
    taps: tuple[int, ...]
    """Layers whose inputs are tapped."""
    num_layers: int = 36
    target_hidden: int = 4096
    slots: Slots = Slots.FILL_IN
    block: int = 16
    mask: int | None = MASK
    masks: set[LayerMask] = field(default_factory=lambda: {LayerMask()})
    markov: MarkovConfig | None = None
    theta: float = 1e6
    tensors: tuple[str, ...] = ()
    draft_vocab: int = 151936


INPUTS = tuple(layer + 1 for layer in FIVE)
VANILLA = MarkovConfig(256, MarkovKind.VANILLA, True, True)
SHIFT7 = {"slots": Slots.SHIFT, "block": 7}
PUBLISHED = {
    "z-lab/Qwen3-8B-DFlash-b16": Published(
        of(
            "DFlashDraftModel",
            block_size=16,
            num_target_layers=36,
            dflash_config={"mask_token_id": MASK, "target_layer_ids": FIVE},
        ),
        DFLASH,
        INPUTS,
    ),
    "z-lab/Qwen3-4B-DFlash-b16, of the first, without ids": Published(
        of("DFlashDraftModel", block_size=16, num_target_layers=36, dflash_config={"mask_token_id": MASK}),
        DFLASH,
        INPUTS,
    ),
    "one layer, without ids": Published(
        of("DFlashDraftModel", num_hidden_layers=1, block_size=10, mask_token_id=MASK), DFLASH, (19,), block=10
    ),
    "z-lab/gpt-oss-20b-DFlash, whose layers slide": Published(
        of(
            "DFlashDraftModel",
            block_size=8,
            sliding_window=128,
            layer_types=["sliding_attention"] * 4 + ["full_attention"],
            dflash_config={"mask_token_id": MASK, "target_layer_ids": [1, 6, 11, 16, 21]},
        ),
        DFLASH,
        (2, 7, 12, 17, 22),
        num_layers=24,
        block=8,
        masks={LayerMask(True, 128), LayerMask()},
    ),
    "meta-models/Muse-Glimmer-30B-assistant": Published(
        of("MuseGlimmerAssistantModel", block_size=8, dflash_config={"mask_token_id": 7, "target_layer_ids": FIVE}),
        DFLASH,
        INPUTS,
        block=8,
        mask=7,
        tensors=("encoder.fc.weight", "encoder.output_norm_enc.weight"),
    ),
    "XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash, with a window of its own": Published(
        of(
            "DFlashDraftModel",
            block_size=16,
            dflash_config={"target_layer_ids": FIVE, "mask_token_id": MASK, "use_swa": True, "swa_window_size": 1024},
        ),
        DFLASH,
        INPUTS,
        masks={LayerMask(False, 1024)},
    ),
    "RedHatAI/Qwen3-8B-speculator.dflash": Published(
        {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "aux_hidden_state_layer_ids": [2, 18, 33],
            "block_size": 8,
            "mask_token_id": MASK,
            "draft_vocab_size": 32000,
            "transformer_layer_config": qwen3(rope_parameters={"rope_type": "default", "rope_theta": 1000000}),
        },
        DFLASH,
        (2, 18, 33),
        block=8,
        draft_vocab=32000,
    ),
    "deepseek-ai/dspark_qwen3_8b_block7": Published(
        of(
            "Qwen3DSparkModel",
            block_size=7,
            target_layer_ids=FIVE,
            mask_token_id=MASK,
            markov_rank=256,
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
        ),
        DSPARK,
        INPUTS,
        markov=VANILLA,
        **SHIFT7,
    ),
    "deepseek-ai/dflash_qwen3_8b_block7, which is DSpark without its sequential part": Published(
        of("Qwen3DSparkModel", block_size=7, target_layer_ids=[-1, *FIVE[1:]], mask_token_id=MASK, markov_rank=0),
        DSPARK,
        (0, *INPUTS[1:]),
        markov=MarkovConfig(0, MarkovKind.VANILLA, False, False),
        **SHIFT7,
    ),
    "RedHatAI/Qwen3-8B-speculator.dspark": Published(
        {
            "speculators_model_type": "dspark",
            "aux_hidden_state_layer_ids": [2, 18, 33],
            "block_size": 8,
            "mask_token_id": MASK,
            "markov_rank": 256,
            "transformer_layer_config": qwen3(),
        },
        DSPARK,
        (2, 18, 33),
        block=8,
        markov=MarkovConfig(256, MarkovKind.VANILLA, False, True),
    ),
    "a speculators' DSpark that drafts from the anchor": Published(
        {
            "speculators_model_type": "dspark",
            "aux_hidden_state_layer_ids": [2, 18, 33],
            "sample_from_anchor": True,
            "block_size": 7,
            "mask_token_id": MASK,
            "markov_rank": 64,
            "markov_head_type": "rnn",
            "transformer_layer_config": qwen3(),
        },
        DSPARK,
        (2, 18, 33),
        markov=MarkovConfig(64, MarkovKind.RNN, False, True),
        **SHIFT7,
    ),
    "z-lab/Qwen3.8-27B-DFlash2": Published(
        of(
            "DFlash2DraftModel",
            hidden_size=5120,
            num_attention_heads=32,
            vocab_size=248320,
            block_size=8,
            rope_theta=10000000,
            sliding_window=2048,
            layer_types=["sliding_attention"] * 5,
            is_causal=False,
            dflash_config={
                "mask_token_id": 248070,
                "target_layer_ids": [5, 19, 33, 47, 61],
                "conv_kernel_size": 2,
                "conv_group_size": 16,
                "selector_rank": 256,
                "selector_top_k": 16,
            },
        ),
        DFLASH2,
        (6, 20, 34, 48, 62),
        num_layers=64,
        target_hidden=5120,
        block=8,
        mask=248070,
        masks={LayerMask(False, 2048)},
        theta=1e7,
        draft_vocab=248320,
    ),
    "JetSpec/jetspec-qwen3-8b": Published(
        of(
            "DFlashDraftModel",
            block_size=16,
            dflash_config={"mask_token_id": MASK, "target_layer_ids": FIVE, "causal_head": True},
        ),
        JETSPEC,
        INPUTS,
        masks={LayerMask(True)},
    ),
}


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
        ({"is_neox_style": False}, "is_neox_style=False is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"sample_from_anchor": True}, "sample_from_anchor=True is not supported in a DFlash head"),
        ({"num_target_layers": 28}, "num_target_layers=28 differs from the target's 36"),
        ({"layer_types": SLIDING}, "a layer slides, and neither"),
        ({"layer_types": SLIDING[:2]}, "are not 5 of full or sliding attention"),
        ({"block_size": 1}, "block_size=1 is not in 2..1024"),
        ({"block_size": 1 << 40}, "block_size=1099511627776 is not in 2..1024"),
        ({"block_size": None}, "block_size=None is no whole number"),
        ({"dflash_config": {"target_layer_ids": FIVE}}, "names no token of masked slots: mask_token_id, dspark_noise"),
        ({"dflash_config": {"mask_token_id": 200000, "target_layer_ids": FIVE}}, "mask_token_id=200000 is outside"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 9]}}, "fc.weight reads 20480 values: 2 taps"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [9, 1]}}, "not the ascending ids of layers"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 99]}}, "not the ascending ids of layers"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 35]}},
            "the last layer's output before its norm",
        ),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": "all"}}, "is no list of whole numbers"),
        ({"dflash_config": 3}, "dflash_config=3 is no object"),
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
