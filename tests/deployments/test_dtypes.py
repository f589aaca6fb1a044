"""The dtype of a model, by device, by the stored dtype and by the setting."""

import json

import pytest

from tests.needs import needs
from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.config import resolve_dtype
from wingbeat.runtime.drafters.choice import FALLBACK


@pytest.mark.parametrize(
    ("fields", "on_gpu"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32"}, "bfloat16"),
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({"dtype": "float64"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_weights_are_held_in_half_precision_on_a_gpu_and_in_float32_on_a_cpu(tmp_path, fields, on_gpu):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert AppConfig(model=tmp_path, drafter=FALLBACK.kind, num_gpus_per_verifier=1).resolved_dtype() == on_gpu
    assert AppConfig(model=tmp_path, drafter=FALLBACK.kind).resolved_dtype() == "float32"


def test_a_dtype_that_is_given_is_kept():
    assert AppConfig(num_gpus_per_verifier=1, num_gpus_per_drafter=1, dtype="float16").resolved_dtype() == "float16"
    assert AppConfig(dtype="bfloat16").resolved_dtype() == "bfloat16"


@pytest.mark.parametrize(("stored", "tries"), [("bfloat16", True), ("float16", False), ("float32", False)])
def test_only_auto_lets_a_cpu_try_what_the_model_is_stored_in(tmp_path, stored, tries):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": stored}))
    config = AppConfig(model=tmp_path, drafter=FALLBACK.kind, dtype="auto")
    assert (config.tries_bfloat16(), config.resolved_dtype()) == (tries, "float32")
    assert not AppConfig(model=tmp_path, drafter=FALLBACK.kind).tries_bfloat16()
    assert (config.text_identity() != AppConfig(model=tmp_path, drafter=FALLBACK.kind).text_identity()) == tries


@needs("ranks")
def test_ranks_try_no_other_dtype(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    assert not AppConfig(model=tmp_path, drafter=FALLBACK.kind, dtype="auto", tensor_parallel_size=2).tries_bfloat16()


def test_eight_bits_are_of_weights_alone():
    config = AppConfig(dtype="int8")
    assert (config.rounds_weights(), config.resolved_dtype(), config.tries_bfloat16()) == (True, "float32", False)
    assert config.text_identity() != AppConfig(dtype="float32").text_identity()
    assert resolve_dtype("int8", "cpu", "bfloat16") == "float32"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"num_gpus_per_verifier": 1, "num_gpus_per_drafter": 1}, "dtype is int8 and .*cuda: .*; use device cpu"),
        ({"tensor_parallel_size": 2}, "dtype is int8 and tensor_parallel_size is 2: .*; leave dtype out"),
    ],
    ids=["gpu", "ranks"],
)
def test_eight_bits_are_of_one_process_on_a_cpu(given, line):
    with pytest.raises(ValueError, match=line):
        AppConfig(dtype="int8", drafter="none", **given)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int4", "float64", "int8pt"])
def test_a_dtype_that_nothing_runs_in_is_refused_by_its_name(name):
    with pytest.raises(ValueError, match=f"dtype is '{name}': use one of auto, float32, bfloat16, float16, int8"):
        resolve_dtype(name, "cpu", None)
    with pytest.raises(ValueError, match="dtype"):
        AppConfig(dtype=name)


def test_weights_of_eight_bits_are_named_beside_the_dtype_of_the_rest():
    assert AppConfig(dtype="int8").shown_dtype("float32") == "int8 weights, float32 otherwise"
    assert AppConfig(dtype="float32").shown_dtype("float32") == "float32"
