"""`wingbeat inspect` says which of a verifier's parameters are prediction modules."""

import pytest
import torch

from tests.runtime.mtp.mtp_world import Modules
from wingbeat.deployments.inspection.command import inspect_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", ["deepseek", "qwen"])
def test_prediction_modules_are_counted_apart(tmp_path, layout):
    family, count = ("deepseek_v3", 2) if layout == "deepseek" else ("qwen3", 1)
    modules = Modules.random(family, count)
    modules.save(tmp_path, layout, copies=layout == "deepseek")
    found = inspect_model(tmp_path, torch.float32, CPU)
    main = sum(tensor.numel() for name, tensor in modules.model.state_dict().items() if not _is_module(name))
    assert found["mtp"]["modules"] == count
    assert found["parameters"] - found["mtp"]["parameters"] == main
    assert found["memory"]["weights_bytes"] == 4 * main


def _is_module(name):
    return name.startswith(("model.layers.2.", "model.layers.3."))
