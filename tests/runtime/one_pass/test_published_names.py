"""Every published head that is known by name: read as its family, or refused for the true reason.

Fields are those that tell families apart; sizes are those of one verifier of 36 layers, whatever the head's own are.
"""

from functools import partial
from typing import Any, NamedTuple

import pytest

from tests.runtime.one_pass.published_heads import DFLASH, DFLASH2, DSPARK, FIVE, JETSPEC, MASK, PEAGLE, qwen3
from wingbeat.runtime.heads.eagle3 import EagleHeadConfig
from wingbeat.runtime.heads.head_config import conventions, head_config
from wingbeat.runtime.heads.layouts import UnsupportedCheckpointError, recognise
from wingbeat.runtime.one_pass.families import OnePassFamily, one_pass_family
from wingbeat.runtime.one_pass.read_config import check_supported, read_one_pass_config

HIDDEN, LAYERS = 4096, 36
OUTPUTS = tuple(layer + 1 for layer in FIVE)


class Head(NamedTuple):
    """Names in a config and in the tensors, and the family that is derived from them."""

    architecture: str
    fields: dict[str, Any]
    verdict: OnePassFamily | str
    """A family, "EAGLE-3", "EAGLE-3 with MLA", or words of the refusal."""
    tensors: tuple[str, ...] = ("fc.weight", "hidden_norm.weight")


def dflash(verdict=DFLASH, block=16, architecture="DFlashDraftModel", **own):
    own = {"mask_token_id": MASK, "target_layer_ids": FIVE} | own
    return Head(architecture, {"block_size": block, "dflash_config": own}, verdict)


def dspark(verdict=DSPARK, architecture="Qwen3DSparkModel", **fields):
    own = {"block_size": 7, "target_layer_ids": FIVE, "mask_token_id": MASK, "markov_rank": 256}
    return Head(architecture, own | {"enable_confidence_head": True} | fields, verdict)


def dflash2(**own):
    sizes = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    return dflash(DFLASH2, 8, "DFlash2DraftModel", **sizes, **own)


def speculators(kind, verdict, **fields):
    own = {"speculators_model_type": kind, "block_size": 8, "mask_token_id": MASK, "aux_hidden_state_layer_ids": [2, 9]}
    return Head("", own | fields | {"transformer_layer_config": qwen3()}, verdict)


def peagle(**fields):
    own = {"mask_token_id": MASK, "eagle_aux_hidden_state_layer_ids": [2, 18, 33], "parallel_drafting": True}
    tensors = ("fc.weight", "layers.0.hidden_norm.weight", "layers.1.input_layernorm.weight", "mask_hidden")
    return Head("LlamaForCausalLMEagle3", own | fields, PEAGLE, tensors)


def eagle3(verdict="EAGLE-3", **fields):
    own = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}, "draft_vocab_size": 32000}
    return Head("LlamaForCausalLMEagle3", own | fields, verdict, ("midlayer.hidden_norm.weight", "fc.weight"))


MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
HEADS = {
    **{
        f"z-lab/{verifier}-DFlash": dflash()
        for verifier in (
            *("Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.5-35B-A3B", "Qwen3.5-122B", "Qwen3.6-27B"),
            *("Qwen3.6-35B-A3B", "Qwen3-Coder-30B-A3B", "Qwen3-Coder-Next", "Kimi-K2.5"),
        )
    },
    "z-lab/Qwen3-4B-DFlash-b16": dflash(),
    "z-lab/gpt-oss-120b-DFlash": dflash(block=8, use_swa=True, swa_window_size=128),
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": dflash(block=10),
    "z-lab/gemma-4-31B-it-DFlash, of Gemma's layers": dflash("a Gemma body")._replace(
        fields={"model_type": "gemma4_text", "block_size": 16, "dflash_config": {"mask_token_id": MASK}}
    ),
    "incoai/Muse-Glimmer-30B-DFlash2": dflash2(input_embedding_scale=2.0, final_logit_softcapping=30.0),
    "deepseek-ai/dspark_qwen3_4b_block7": dspark(),
    "deepseek-ai/dspark_qwen3_14b_block7": dspark(markov_head_type="gated"),
    "deepseek-ai/dspark_gemma4_12b_block7": dspark("a Gemma body", "Gemma4DSparkModel"),
    "deepseek-ai/dflash_gemma4_12b_block7": dspark("a Gemma body", "Gemma4DSparkModel", markov_rank=0),
    "makora-ai/gemma4-26b-a4b-dspark": dspark("a Gemma body", "Gemma4DSparkModel"),
    "Inferact/Kimi-K3-DSpark": dspark("MLA attention", "K3DSparkModel", **MLA),
    "inclusionAI/Ling-3.0-flash-dspark": dspark(architecture="DSparkDraftModel"),
    "RedHatAI/gemma-4-31B-it-speculator.dspark": speculators("dspark", DSPARK, markov_rank=256),
    "RedHatAI/GLM-5.2-speculator.dspark": speculators("dspark", DSPARK, markov_rank=256),
    "nvidia/Nemotron-3.5, DFlash": dflash(),
    "nvidia/Nemotron-3.5, DSpark": dspark(architecture="DSparkDraftModel"),
    "nvidia/Nemotron-3.5, LiLiCorr": Head("LiLiCorrDraftModel", {}, "LiLiCorr is not supported"),
    "poolside's Laguna": dflash(architecture="LagunaDFlashDraftModel"),
    **{
        f"JetSpec/jetspec-{verifier}": dflash(JETSPEC, causal_head=True)
        for verifier in ("qwen3-30b-a3b", "Qwen3.6-35B-A3B", "gemma4-26B-A4B0-it", "gpt-oss-20b", "Step-3.7-Flash")
    },
    "Huang2020/Qwen3-8B-Domino-b16": dflash("Domino is not supported", projector_type="domino", shift_label=True),
    "amazon/GPT-OSS-20B-P-EAGLE": peagle(ptd_token_id=201087),
    "amazon/gpt-oss-20b-p-eagle-long-context": peagle(),
    "amazon/gpt-oss-120b-p-eagle": peagle(pard_token=201087),
    "amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE": peagle(),
    "RedHatAI/Qwen3-8B-speculator.peagle": peagle(speculators_model_type="peagle"),
    "lmsys/SGLang-EAGLE3 (SpecBundle)": eagle3(),
    "lightseekorg/kimi-k2.6-eagle3.1-mla": eagle3("EAGLE-3 with MLA", **MLA, fc_norm=True, norm_output=True),
    "lightseekorg/kimi-k3-eagle3-mla": eagle3("EAGLE-3 with MLA", **MLA),
    "an EAGLE-4 head": Head("Eagle4ForCausalLM", {}, "EAGLE-4 is not supported: its licence allows no independent"),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_head_known_by_name_is_read_or_refused_for_the_true_reason(head):
    raw = qwen3(architectures=[head.architecture]) | head.fields
    family = one_pass_family(raw, head.tensors)
    taps = len(raw.get("aux_hidden_state_layer_ids", FIVE))
    shapes = dict.fromkeys(head.tensors, (1,)) | {"fc.weight": (HIDDEN, taps * HIDDEN)}
    if isinstance(head.verdict, OnePassFamily):
        assert family is head.verdict
        if family is PEAGLE:
            check_supported(raw, raw, family, shapes)
            return
        config = read_one_pass_config(raw, family, shapes, HIDDEN, LAYERS)
        assert config.tap_layers == (OUTPUTS if taps == len(FIVE) else (2, 9))
        assert config.mask_token_id == MASK
        return
    if not head.verdict.startswith("EAGLE-3"):
        read = partial(recognise, raw, head.tensors)
        if family is not None:
            read = partial(read_one_pass_config, raw, family, shapes, HIDDEN, LAYERS)
        with pytest.raises(UnsupportedCheckpointError, match=head.verdict):
            read()
        return
    layout, shapes["fc.weight"] = recognise(raw, head.tensors), (HIDDEN, 3 * HIDDEN)
    reading = conventions(raw, layout, shapes, LAYERS, HIDDEN)[0]
    config = head_config(raw, layout, shapes, HIDDEN, reading)
    assert reading.tap_layers == (2, 18, 33)
    assert isinstance(config, EagleHeadConfig)
    assert (type(config) is not EagleHeadConfig) == head.verdict.endswith("MLA")
    if head.verdict.endswith("MLA"):
        assert (config.head_dim, config.value_dim, config.kv_numbers) == (192, 128, 32 * 320)
        assert (config.query_rank, config.rope_interleaved) == (1536, True)
