"""Kernels are chosen at start, by comparing their results on the device with those of the reference."""

import json
import sys

import pytest
import torch

pytest.importorskip("triton")

from wingbeat.kernels import choice, parts
from wingbeat.kernels.gpu import comparison
from wingbeat.kernels.gpu.comparison import Difference, Shape
from wingbeat.runtime import pair
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.engine_checks import kernel_check
from wingbeat.runtime.engine_checks.bounded_step import StepTimeout
from wingbeat.runtime.engine_checks.kernel_check import choose_kernels

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_choice_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the choice of kernels around each test."""
    choose_kernels.cache_clear()
    monkeypatch.setattr(choice, "_replaced", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


def test_a_kernel_that_differs_is_replaced_by_its_reference_in_one_line(monkeypatch, caplog):
    monkeypatch.setattr(comparison, "differences", lambda *_: [Difference("silu_mul", "differs by 3")])
    (line,) = choose_kernels(CUDA, torch.bfloat16)
    assert line == "kernel silu_mul: differs by 3; its torch reference runs instead, which is slower"
    assert line in caplog.text
    assert choice.replaced() == ("silu_mul",)


@pytest.mark.parametrize(
    ("more", "head_dim"), [({}, 80), ({"head_dim": 256, "global_head_dim": 512}, 512)], ids=["llama", "gemma4"]
)
def test_kernels_are_asked_once_in_a_process_and_for_the_models_own_heads(monkeypatch, tmp_path, more, head_dim):
    fields = {"model_type": "llama", "num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 12 * 80}
    (tmp_path / "config.json").write_text(json.dumps(fields | more))
    asked = []
    monkeypatch.setattr(comparison, "differences", lambda device, *shape: asked.append(shape) or [])
    for _ in range(2):
        assert choose_kernels(CUDA, torch.float16, model=tmp_path) == ()
    assert asked == [(Shape(torch.float16, 12, 3, head_dim),)]


def test_torchs_own_are_taken_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(comparison, "differences", lambda *_: 1 / 0)
    pair.choose_kernels(EngineConfig(kernels="torch"), CUDA, torch.bfloat16, None)
    assert choice.replaced() == tuple(choice.KERNELS)


def test_an_installation_without_triton_runs_references(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wingbeat.kernels.gpu.comparison", None)
    parts.hooks_of.cache_clear()
    (line,) = choose_kernels(CUDA, torch.bfloat16)
    assert line.startswith("Triton cannot be imported")
    assert choice.replaced() == tuple(choice.KERNELS)


def test_a_compiler_that_hangs_ends_the_start_with_what_to_switch_off(monkeypatch, hang):
    monkeypatch.setattr(kernel_check, "LIMIT_S", 0.2)
    monkeypatch.setattr(comparison, "differences", hang)
    with pytest.raises(StepTimeout, match=r"checking the kernels takes longer than .*--kernels torch"):
        choose_kernels(CUDA, torch.bfloat16)


def test_nothing_is_chosen_on_a_cpu():
    pair.choose_kernels(EngineConfig(kernels="torch"), torch.device("cpu"), torch.float32, None)
    assert choice.replaced() == ()


def test_a_choice_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="kernels is 'triton': use one of auto, torch"):
        EngineConfig(kernels="triton")
