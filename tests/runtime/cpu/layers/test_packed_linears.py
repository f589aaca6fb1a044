"""Packing weights in another layout changes the time of a product, and not its result."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.runtime.models import CONFIGS
from wingbeat.kernels.cpu.group_panels import GroupPanels
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.cpu.layers.packed_linears import (
    InputMajorLinear,
    draft_matrices,
    lay_out_linears,
    pack_draft_linear,
)

pytestmark = pytest.mark.few(2)


def random_model(name, dtype=torch.float32):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_weights_keep_their_values_and_logits_their_digits(name):
    model = random_model(name)
    twin = copy.deepcopy(model)
    num_laid = lay_out_linears(model)
    assert num_laid == sum(isinstance(module, nn.Linear) for module in model.modules()) > 0
    for (key, laid), (_, usual) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(laid, usual), key
    token_ids = torch.arange(9)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(token_ids).logits, twin(token_ids).logits, rtol=1e-4, atol=1e-4)


def test_weights_lie_input_by_input():
    linear = nn.Linear(6, 10, bias=False).requires_grad_(False)
    lay_out_linears(linear)
    assert linear.weight.shape == (10, 6)
    assert linear.weight.stride() == (1, 10)


def test_tied_embeddings_stay_tied():
    config = copy.deepcopy(CONFIGS["llama"])
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config)
    lay_out_linears(model)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_other_dtypes_are_left_alone():
    model = random_model("llama", torch.bfloat16)
    assert lay_out_linears(model) == 0
    assert not any(isinstance(module, InputMajorLinear) for module in model.modules())


def test_a_linear_with_weights_of_another_day_multiplies_by_those():
    linear = nn.Linear(4, 3, bias=False).requires_grad_(False)
    lay_out_linears(linear)
    x = torch.randn(2, 4)
    linear(x)
    for weight in (torch.ones(3, 4), torch.zeros(3, 4)):
        linear.weight = nn.Parameter(weight, requires_grad=False)
        assert torch.equal(linear(x), x @ weight.T)
    linear.double()
    assert linear(x.double()).dtype == torch.float64
    twin = copy.deepcopy(linear)
    with torch.no_grad():
        twin.weight.fill_(2)
    assert torch.equal(twin(x.double()), x.double() @ twin.weight.T)
    assert torch.equal(linear(x.double()), torch.zeros(2, 3, dtype=torch.float64))


def test_a_bias_is_added():
    linear = nn.Linear(4, 3).requires_grad_(False)
    x = torch.randn(2, 4)
    expected = linear(x)
    assert lay_out_linears(linear) == 1
    torch.testing.assert_close(linear(x), expected)


def test_gradients_flow_where_they_are_asked_for():
    linear = nn.Linear(4, 3, bias=False)
    lay_out_linears(linear)
    linear(torch.ones(2, 4)).sum().backward()
    assert torch.equal(linear.weight.grad, torch.full((3, 4), 2.0))


@pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_large_weights_of_draft_heads_are_rounded(dtype, bias):
    torch.manual_seed(1)
    sizes = (2 * cpu_kernels().panel, 40)
    whole = nn.Linear(576, sum(sizes), bias=bias, dtype=dtype).requires_grad_(False)
    whole.weight[3, :32] = 0.0
    kept = whole.weight.data
    in_parts, weight, rows = copy.deepcopy(whole), whole.weight.float().clone(), torch.randn(3, 576, dtype=dtype)
    expected = nn.functional.linear(rows.float(), weight, whole.bias if whole.bias is None else whole.bias.float())
    assert pack_draft_linear(whole, cpu_kernels())
    assert pack_draft_linear(in_parts, cpu_kernels(), sizes)
    assert isinstance(whole.panels, GroupPanels)
    assert torch.equal(kept.float(), weight)  # a verifier may use it too
    assert [matrix.columns for matrix in draft_matrices(in_parts)] == list(sizes)
    assert torch.equal(in_parts(rows), whole(rows))
    torch.testing.assert_close(whole(rows).float(), expected, atol=3e-2, rtol=0)
    steps = weight.unflatten(1, (-1, 32)).abs().amax(2, keepdim=True).expand(-1, -1, 32).flatten(1) / 127
    held = in_parts.dense_weight()
    assert held.dtype == dtype
    assert ((held.float() - weight).abs() <= steps * (0.51 if dtype == torch.float32 else 1)).all()


@pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
@pytest.mark.parametrize(("inputs", "parts"), [(96, None), (584, None), (576, (20, 20))])
def test_other_weights_of_draft_heads_keep_their_numbers(inputs, parts):
    linear = nn.Linear(inputs, 40, bias=False).requires_grad_(False)
    weight = linear.weight.clone()
    assert pack_draft_linear(linear, cpu_kernels(), parts)
    assert torch.equal(linear.dense_weight(), weight)
