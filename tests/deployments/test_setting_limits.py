"""Impossible settings, such as unknown fields and numbers that no machine holds, end in a line."""

import importlib
import pkgutil
import re
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.options.model_options import ModelFolder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3: it must divide num_attention_heads of Llama"),
        (
            {"autoscaling_config": {"min_replica": 0}},
            "'min_replica' is not a field of Ray Serve's: did you mean min_r",
        ),
        (
            {"router_autoscaling_config": {"replicas": 1}},
            "'replicas' is not a field of Ray Serve's: did you mean min_r",
        ),
        ({"autoscaling_config": {"max_replicas": "x"}}, "max_replicas: Input should be a valid integer"),
        ({"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}, r"max_replicas .2. must be greater"),
        ({"autoscaling_config": {"max_replicas": 10**9}}, "max_replicas is 1000000000: use a whole number, at most"),
        (
            {"autoscaling_config": {"policy": {"function": "x"}}},
            "'function' is not a field of Ray Serve's: did you mean pol",
        ),
        ({"autoscaling_config": "{"}, "must be a JSON object"),
        ({"num_replicas": 10**9}, "num_replicas"),
        ({"threads": 10**9}, "threads"),
        ({"max_num_seqs": 10**9}, "max_num_seqs is 1000000000: use at most 1048576"),
        ({"max_num_batched_tokens": 10**10}, "max_num_batched_tokens is 10000000000: use at most"),
        ({"block_size": 10**9}, "block_size is 1000000000: use at most"),
        ({"draft_steps": 10**9}, "draft_steps is 1000000000: use at most"),
        ({"verify_tree_size": 10**9}, "verify_tree_size is 1000000000: use at most"),
        ({"engine_wait_s": 1e30}, "engine_wait_s is 1e.30: use at most 1e.07"),
        ({"max_ongoing_requests": 2**40}, "max_ongoing_requests is 1099511627776: use at most"),
        ({"max_queued_requests": 10**30}, "max_queued_requests is 1000.*: use at most"),
        ({"drafters": {"num": 10**9}}, "drafters.num"),
        ({"drafters": {"num": 1, "start_timeout_s": 1e30}}, "drafters.start_timeout_s"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_meant_is_refused_by_its_name(values: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        AppConfig.model_validate(values)


def option_models() -> list[type[BaseModel]]:
    """Every pydantic model of settings, nested ones included."""
    root = importlib.import_module("wingbeat.deployments")
    for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
        if re.match(r"wingbeat\.deployments\.(options|cli|bench|inspection|app_config)", module.name):
            importlib.import_module(module.name)
    found: list[type[BaseModel]] = []
    values = [kind for field in AppConfig.model_fields.values() for kind in get_args(field.annotation)]
    left = [ModelFolder, *(kind for kind in values if isinstance(kind, type) and issubclass(kind, BaseModel))]
    while left:
        model = left.pop()
        if model not in found:
            found.append(model)
            left += model.__subclasses__()
    return found


def test_no_model_of_settings_takes_a_field_that_it_does_not_know():
    models = option_models()
    assert len(models) >= 10
    assert not [model.__name__ for model in models if model.model_config.get("extra") != "forbid"]
