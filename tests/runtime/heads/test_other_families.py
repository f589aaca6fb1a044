"""Heads of families other than EAGLE are refused by name."""

import re

import pytest

from tests.runtime.heads.head_folder import edit_config, edit_tensors, load
from tests.runtime.heads.test_load import rename
from wingbeat.runtime.head_families.families import ONE_PASS
from wingbeat.runtime.heads.layouts import UnsupportedCheckpointError, recognise
from wingbeat.runtime.heads.load import is_head_folder


@pytest.mark.parametrize(
    ("fields", "edit", "family"),
    [
        ({"architectures": ["LlamaForCausalLMEagle4"]}, None, "EAGLE-4"),
        ({}, rename("lm_head", "efficient_lm_head"), "EAGLE-4"),
        ({"architectures": ["DFlashDraftModel"]}, None, "DFlash"),
        ({"dflash_config": {"mask_token_id": 3}}, None, "DFlash"),
        ({"architectures": ["DominoDraftModel"], "dflash_config": {}}, None, "Domino"),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {}}, None, "DSpark"),
        ({"architectures": ["PEagleDraftModel"]}, None, "P-EAGLE"),
        ({"eagle_config": {"parallel_draft_step": 4}}, None, "P-EAGLE"),
        ({"speculators_model_type": "peagle"}, None, "P-EAGLE"),
        ({"speculators_model_type": "mlp"}, None, "the speculators kind 'mlp'"),
        ({}, rename("midlayer.mlp", "midlayer.mlp.experts.0"), "a head with a mixture of experts"),
        ({}, rename("lm_head.weight", "lm_head.weight_scale_2"), "a head quantised by "),
        ({}, rename("lm_head.weight", "lm_head.qweight"), "a head quantised by "),
        ({"eagle_config": {"use_aux_hidden_state": False}}, None, "an EAGLE-3 head over one hidden state"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, None, "ModelOpt's head with eagle_config.use_mtp_layernorm"),
        ({"medusa_num_heads": 4}, None, "Medusa"),
        ({"architectures": ["Qwen3XPressModel"], "dflash_config": {}}, None, "xPress"),
        ({"architectures": ["LiLiCorrDraftModel"], "dflash_config": {}}, None, "LiLiCorr"),
    ],
)
def test_other_families_are_refused_by_name(folder, fields, edit, family):
    edit_config(folder, **fields)
    if edit is not None:
        edit_tensors(folder, edit)
    why = "drafts in one pass" if family in ONE_PASS else "is not supported"
    with pytest.raises(UnsupportedCheckpointError, match=f"^{re.escape(family)}.* {why}"):
        load(folder)
    assert is_head_folder(folder)


@pytest.mark.parametrize(
    ("fields", "family"),
    [
        ({"architectures": ["PEagleDraftModel"], "num_hidden_layers": 4}, "P-EAGLE"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]}}, "DFlash"),
        ({"architectures": ["DominoDraftModel"], "dflash_config": {"projector_type": "domino"}}, "Domino"),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark"}}, "DSpark"),
    ],
    ids=["qwen3-8b-peagle", "qwen3-4b-dflash", "qwen3-8b-domino", "qwen3-4b-dspark"],
)
def test_a_published_config_of_another_family_is_refused(fields, family):
    why = "drafts in one pass" if family in ONE_PASS else "is not supported"
    with pytest.raises(UnsupportedCheckpointError, match=f"^{family} {why}"):
        recognise(fields, ["layers.0.hidden_norm.weight", "fc.weight"])
