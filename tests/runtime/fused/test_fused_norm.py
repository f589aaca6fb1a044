"""Norms are fused only where every bit stays the same."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.runtime.models import CONFIGS
from wingbeat.runtime.fused.speed_up import fuse_norms

pytestmark = pytest.mark.few(3)


def random_model(name, dtype=torch.float32):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def num_norms(model):
    return sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_logits_keep_every_bit(name, dtype):
    model = random_model(name, dtype)
    token_ids = torch.arange(9)[None]
    with torch.no_grad():
        before = model(token_ids).logits
        num_fused = fuse_norms(model)
        assert torch.equal(model(token_ids).logits, before)
    assert fuse_norms(model) == num_fused, "a fused norm is still one"
    if dtype == torch.float32 and not name.startswith("gemma"):  # Gemma's scale is 1 + weight
        assert num_fused == num_norms(model)


def test_a_copy_has_its_own_weights():
    model = random_model("llama")
    fuse_norms(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.norm.weight.mul_(2)
        token_ids = torch.arange(5)[None]
        assert torch.allclose(twin(token_ids).logits, 2 * model(token_ids).logits)


def test_a_norm_that_only_looks_alike_is_left_alone():
    class CentredRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x):
            x = x - x.mean(-1, keepdim=True)
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    assert fuse_norms(nn.Sequential(CentredRMSNorm())) == 0
