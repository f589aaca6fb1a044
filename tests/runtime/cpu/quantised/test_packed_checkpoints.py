"""Weights of quantised checkpoints stay packed where kernels multiply by them."""

import pytest
import torch

from tests.runtime.quantised.test_checkpoints import CASES, CPU, save_quantised
from wingbeat.kernels.cpu.group_panels import GroupPanels
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.verifier.loading.loader import load_model

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES)
def test_every_weight_stays_packed(tmp_path, case):
    meant = save_quantised(tmp_path, *CASES[case])
    model = load_model(tmp_path, torch.float32, CPU).model
    packed = [module for module in model.modules() if isinstance(getattr(module, "panels", None), GroupPanels)]
    assert len(packed) == len(meant)
    assert all(parameter.untyped_storage().nbytes() == 4 for parameter in (module.weight for module in packed))


def test_other_dtypes_and_whoever_asks_hold_numbers(tmp_path):
    meant = save_quantised(tmp_path, *CASES["awq"])
    for loaded in (load_model(tmp_path, torch.bfloat16, CPU), load_model(tmp_path, torch.float32, CPU, packed=False)):
        held = dict(loaded.model.named_modules())
        assert not any(isinstance(getattr(module, "panels", None), GroupPanels) for module in held.values())
        weight = loaded.model.state_dict()["model.layers.0.mlp.up_proj.weight"]
        assert torch.equal(weight, meant["model.layers.0.mlp.up_proj.weight"].to(weight.dtype))
