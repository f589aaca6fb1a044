"""Output matrices in half precision leave float32 on a GPU, where they are plain ones, and nowhere else."""

import logging

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from tests.runtime.fake_gpu import CUDA
from tests.runtime.gpu_world import verifier
from wingbeat.runtime.verifier.layers import linears
from wingbeat.runtime.verifier.layers.linears import HALVES, WideLinear, widen_logits


class OwnLinear(nn.Linear):
    """An output matrix of a class that a model's own code may define."""


class Model(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def head(kind: type[nn.Linear], dtype: torch.dtype, device: object) -> nn.Linear:
    made = kind(4, 7, bias=True)
    for name in ("weight", "bias"):
        part = torch.empty(getattr(made, name).shape, dtype=dtype, device=device)
        setattr(made, name, nn.Parameter(part, requires_grad=False))
    return made


@pytest.mark.parametrize("dtype", HALVES)
def test_a_plain_one_on_a_gpu_leaves_float32(gpu, dtype):
    model = Model(head(nn.Linear, dtype, CUDA))
    assert widen_logits(model)
    gpu.strict = True
    before = gpu.launches.copy()
    with torch.inference_mode():
        found = model.head(torch.empty(1, 3, 4, dtype=dtype, device=CUDA))
    assert (found.shape, found.dtype) == ((1, 3, 7), torch.float32)
    assert gpu.launches - before == {"mm": 1, "add_": 1}
    assert set(model.state_dict()) == {"head.weight", "head.bias"}


LEFT = {
    "on the host": (nn.Linear, torch.bfloat16, "cpu"),
    "in float32": (nn.Linear, torch.float32, CUDA),
    "of a class of its own": (OwnLinear, torch.bfloat16, CUDA),
}


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left_as_they_are(gpu, name):
    model = Model(head(*LEFT[name]))
    assert not widen_logits(model)
    assert type(model.head) is LEFT[name][0]


def test_a_product_that_torch_refuses_is_left_as_it_is_and_said(gpu, monkeypatch, caplog):
    def refuse(left: Tensor, right: Tensor, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        raise RuntimeError("out_dtype is not supported here\nat some line")

    monkeypatch.setattr(linears.torch, "mm", refuse)
    model = Model(head(nn.Linear, torch.float16, CUDA))
    with caplog.at_level(logging.INFO, "wingbeat"):
        assert not widen_logits(model)
    assert type(model.head) is nn.Linear
    assert caplog.messages == ["logits stay in torch.float16: out_dtype is not supported here"]


def test_a_loaded_model_says_in_what_its_logits_are(gpu):
    loaded = verifier()
    assert type(loaded.model.get_output_embeddings()) is WideLinear
    assert (loaded.dtype, loaded.logits_dtype) == (torch.bfloat16, torch.float32)
    loaded.model.get_output_embeddings().__class__ = nn.Linear
    assert loaded.logits_dtype == torch.bfloat16
