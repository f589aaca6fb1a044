"""Refused configurations: every wrong value is named with the allowed values, and no error shows a key."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.needs import needs
from wingbeat.deployments import app_config
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli.options import UserError, build_config
from wingbeat.deployments.parts import hooks


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "/no/such/model"}, "model is '/no/such/model': there is no folder /no/such/model"),
        ({"drafter": "eagel"}, "drafter is 'eagel': must be 'auto', 'none', .*the folder of an EAGLE head"),
        ({"max_num_seqs": "0"}, "max_num_seqs is 0: use at least 1"),
        ({"verify_tree_size": 1}, "verify_tree_size is 1"),
        ({"cuda_graphs": True, "device": "cpu"}, "cuda_graphs is True"),
        ({"num_replicas": 2, "autoscaling_config": {}}, "num_replicas is 2 and autoscaling_config is given: both say"),
        ({"device": "cuda", "num_gpus_per_verifier": 0}, "num_gpus_per_verifier is 0"),
        ({"device": "cpu", "num_gpus_per_verifier": 1}, "num_gpus_per_verifier is 1 and device is cpu"),
        ({"num_gpus_per_drafter": 0.3}, "num_gpus_per_drafter is 0.3 and the verifier's device is cpu"),
        ({"num_gpus_per_verifier": 1.5}, "num_gpus_per_verifier is 1.5: must be 0, a fraction up to 1, or a whole"),
        ({"num_gpus_per_verifier": 2}, "num_gpus_per_verifier is 2: .* use 1 and tensor_parallel_size 2"),
        (
            {"num_gpus_per_verifier": 0.5, "tensor_parallel_size": 2},
            "num_gpus_per_verifier is 0.5 and tensor_parallel_size is 2: each rank needs a whole GPU",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}, "kv_cache_dtype is fp8 and tensor_parallel_size is 2"),
        (
            {"tensor_parallel_size": 2, "deterministic": True},
            "deterministic is True and tensor_parallel_size is 2: sums",
        ),
        ({"kv_cache_dtype": "fp8", "deterministic": True}, "deterministic is True and kv_cache_dtype is fp8"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype\n.*'auto' or 'fp8'"),
        ({"tensor_parallel_size": 2, "threads": 0}, "threads is 0 and tensor_parallel_size is 2"),
        (
            {"tensor_parallel_size": 2, "channel": "remote"},
            "channel is remote and tensor_parallel_size is 2: ranks and their drafter",
        ),
        (
            {"channel": "cuda_ipc", "device": "cpu"},
            "channel is 'cuda_ipc': both sides need a GPU, the verifier is on cpu",
        ),
        ({"channel": "cuda_ipc", "num_gpus_per_verifier": 1, "drafter": "ngram"}, "need a GPU, the drafter is on cpu"),
        ({"channel": "nccl"}, "channel"),
        ({"drafter_resources": "cheap"}, "drafter_resources\n.*must be a JSON object"),
        ({"drafter_resources": {"GPU": 1}}, "'GPU' is 1.0: give amounts above 0 of resources other than CPU and GPU"),
        ({"drafter_resources": {"cheap": 0}}, "'cheap' is 0.0: give amounts above 0"),
        ({"verifier_resources": "big"}, "verifier_resources\n.*must be a JSON object"),
        ({"verifier_resources": {"CPU": 1}}, "'CPU' is 1.0: give amounts above 0 of resources other than CPU and GPU"),
        ({"verifier_resources": {"big": -1}}, "'big' is -1.0: give amounts above 0"),
        ({"autoscaling_config": "min_replicas=1"}, "must be a JSON object"),
        ({"autoscaling_config": {"min_replicas": 0}, "engine_wait_s": 0}, "engine_wait_s is 0 and min_replicas is 0"),
        (
            {"autoscaling_config": {"min_replicas": 0}, "max_queued_requests": 0},
            "max_queued_requests is 0 and min_replicas is 0",
        ),
        ({"router_autoscaling_config": {"initial_replicas": 0}}, "initial_replicas is 0: use at least 1"),
        ({"router_autoscaling_config": {"min_replicas": 0}}, "min_replicas is 0: use at least 1"),
        ({"engine_factory": "wingbeat.x"}, "engine_factory is 'wingbeat.x': must read module:function"),
        ({"max_seqs": 4}, "max_seqs"),
        ({"api_key": ""}, "holds a key that is empty"),
        ({"api_key": ["ok", "two words"]}, "holds a key that is empty or has a character"),
        ({"allowed_hosts": "example.org:80"}, "'example.org:80': must be a host name or an address without a port"),
        ({"allowed_origins": "example.org"}, "'example.org': must be an origin such as https://example.org"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"drafters": "2"}, "drafters"),
        ({"drafters": "num=2"}, 'must be a JSON object such as {"num": 2}'),
        ({"drafters": {"num": 0}}, "drafters.num"),
        ({"drafters": {"num": 1, "max_seqs": 4}}, "drafters.max_seqs"),
        (
            {"drafters": {"num": 1}, "drafter": "none"},
            "drafters.num is 1 and drafter is none: it leaves nothing to share",
        ),
        ({"drafters": {"num": 1, "max_num_seqs": 8}}, "drafters.max_num_seqs is 8: use at least max_num_seqs, 16"),
        ({"engine_wait_s": "inf"}, "finite number"),
        ({"drafters": {"num": 1, "start_timeout_s": float("inf")}}, "drafters.start_timeout_s"),
        ({"tool_call_parser": "hermit"}, "tool_call_parser is 'hermit': must be one of hermes, qwen, llama3_json"),
        ({"reasoning_parser": "no.such:Parser"}, "reasoning_parser is 'no.such:Parser': No module named 'no'"),
        ({"unknown_fields": "drop"}, "unknown_fields"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_named_with_its_value_and_what_is_allowed(values: dict, message: str):
    with pytest.raises(ValidationError, match=message.replace("(", r"\(")):
        AppConfig.model_validate(values)


@pytest.mark.parametrize("values", [{"max_num_seqs": 0}, {"nonsense": 1}, {"api_key": "hidden hidden"}, {"api_key": 5}])
def test_no_error_of_the_application_shows_a_key(values: dict):
    with pytest.raises(ValidationError) as caught:
        AppConfig.model_validate({"api_key": "hidden", **values})
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("values", [{"max_num_seqs": "0"}, {"dtype": "int3"}, {"api_key": "hidden hidden"}])
def test_no_error_of_the_command_line_shows_a_key(values: dict):
    with pytest.raises(UserError) as caught:
        build_config(AppConfig, {"api_key": "hidden", **values})
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("drafter", "refused"),
    [("mtp", True), ("ngram", False), ("suffix", False), ("none", False), ("some.module.Class", False)],
)
def test_only_a_drafter_that_runs_a_model_must_have_a_gpu_where_the_verifier_has_one(drafter: str, refused: bool):
    values = {"device": "cuda", "num_gpus_per_verifier": 1, "drafter": drafter}
    if refused:
        with pytest.raises(ValidationError, match="num_gpus_per_drafter is 0"):
            AppConfig.model_validate(values)
    else:
        assert AppConfig.model_validate(values).drafter_device() == "cpu"


def test_a_head_is_never_on_the_cpu_beside_a_verifier_on_a_gpu():
    for more in ({}, {"num_gpus_per_drafter": 0}, {"device": "cuda"}):
        with pytest.raises(ValueError, match=r"num_gpus_per_drafter is 0 and drafter 'auto' has weights .* 0.7 .* 0.3"):
            AppConfig(num_gpus_per_verifier=1, **more)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kv_cache_dtype", "fp8", "kv_cache_dtype is fp8 and engine_dir is given: a TensorRT engine"),
        ("deterministic", True, "deterministic is True and engine_dir is given: an engine's products depend"),
    ],
)
def test_limits_of_the_engine_that_the_tensorrt_backend_refuses(tmp_path: Path, name: str, value: Any, message: str):
    assert getattr(AppConfig(**{name: value}).engine_config(), name) == value
    (tmp_path / "base_config.json").write_text("{}")
    with pytest.raises(ValidationError, match=message):
        AppConfig(**{"engine_dir": tmp_path, name: value})


@needs("shared_drafters")
def test_an_error_of_the_command_line_names_the_field_within_a_setting():
    with pytest.raises(UserError, match=r"^--drafters\.num 0: input should be greater than or equal to 1$"):
        build_config(AppConfig, {"drafters": '{"num": 0}'})


def test_without_a_channel_between_nodes_a_drafter_on_another_one_is_refused(monkeypatch):
    monkeypatch.setattr(app_config, "hooks", lambda name: () if name == "network_channel" else hooks(name))
    for values in ({"channel": "remote"}, {"drafter_resources": {"cheap": 1}}):
        with pytest.raises(ValidationError, match="no installed part has a channel to another node"):
            AppConfig(**values)
    assert AppConfig(channel="shm", drafter_resources={"cheap": 1}).has_channel()
