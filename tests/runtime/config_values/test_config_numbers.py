"""Allowed numbers of a config: no default of transformers' own classes is refused."""

import json
import logging

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from wingbeat.runtime.config_values.config_numbers import problem
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import WITH_IMAGES


@pytest.mark.slow
def test_no_default_of_a_causal_lm_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    refused = {}
    for kind in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *WITH_IMAGES}):
        try:
            text = CONFIG_MAPPING[kind]().to_json_string(use_diff=False)
        except Exception:
            continue
        if (found := problem(json.loads(text))) is not None:
            refused[kind] = found
    assert not refused


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 0, "use_sliding_window": False},
        {"eos_token_id": [1, 2], "pad_token_id": -1},
        {"time_step_limit": [0.0, float("inf")]},
        {"quantization_config": {"hidden_size": -1}},
        {"rope_scaling": None, "head_dim": None},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.2], "long_factor": [4, 8.5]}},
        {"intermediate_size": [64, 128]},
        {"num_local_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0},
        {"use_embedding_multiplier": True},
        {"factor": -1, "some_new_field": "x"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_published_configs_say_passes(fields: dict) -> None:
    assert problem(fields) is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"text_config": {"rms_norm_eps": 0}}, "text_config.rms_norm_eps is 0"),
        ({"rope_parameters": {"full_attention": {"factor": -2}}}, "rope_parameters.full_attention.factor is -2"),
        ({"some_scale": float("nan")}, "some_scale is NaN, it must be a number"),
        ({"rope_theta": []}, "rope_theta is [], it must be a number above 0"),
        ({"dtype": {}}, "dtype is {}"),
        ({"eos_token_id": {}}, "eos_token_id is {}"),
        ({"head_dim": 2**31}, "head_dim is 2147483648, it must be a whole number from 0 to 65536"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_one_is_named_by_its_place(fields: dict, says: str) -> None:
    found = problem(fields)
    assert found is not None
    assert found.startswith(says)
